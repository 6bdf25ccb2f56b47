"""What processes of session addresses share: a run in the service's Redis, whose environment is sessions that a product opens.

Its environment server is `polyreme environment`. `agents.turns` samples its turns, and the API opens its sessions and ends them.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from redis.asyncio import Redis

from polyreme.config.environment import EnvironmentConfig, OnlineConfig
from polyreme.config.run import RunConfig
from polyreme.config.security import SecurityConfig
from polyreme.config.serve import ServeAgents, ServeConfig
from polyreme.experience.embedded_redis import kept_secret
from polyreme.experience.run import Run
from polyreme.rundir.input_files import read_model_files

KEY_ENV, TOKEN_ENV = "POLYREME_SESSION_KEY", "POLYREME_SESSION_TOKEN"
"""The key from which those of sessions are derived, and the token between the environment server and the service."""
KIND: Literal["agent session"] = "agent session"
"""The kind of its records in the request log."""
_WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class AgentPolicy:
    """What a session samples from, as its record has it.

    Attributes:
        tenant: who has opened it.
        weights: the directory of a saved model; "": the base model.
        max_tokens: of a turn; 0: as many as fit.
        seed: with the session's id, it determines the seeds of its turns.
    """

    tenant: str
    weights: str = ""
    temperature: float = 1.0
    max_tokens: int = 0
    seed: int = 0

    def record(self) -> dict[str, str]:
        return {name: str(value) for name, value in asdict(self).items()}

    @classmethod
    def of(cls, record: Mapping[str, str]) -> "AgentPolicy":
        temperature, most, seed = float(record["temperature"]), int(record["max_tokens"]), int(record["seed"])
        return cls(record["tenant"], record["weights"], temperature, most, seed)


def session_secrets(config: ServeConfig) -> dict[str, str]:
    """Environment variables of the processes that take part. Those not set are kept where only the service's user can read."""
    return {name: os.environ.get(name) or kept_secret(config.redis_dir, name.lower()) for name in (KEY_ENV, TOKEN_ENV)}


def run_config(config: ServeConfig, settings: ServeAgents) -> RunConfig:
    """The run of the service's sessions."""
    own = config.security or SecurityConfig(token_env=TOKEN_ENV)
    environment = EnvironmentConfig(
        online=OnlineConfig(
            port=settings.port, url=settings.url, key_env=KEY_ENV, max_sessions=settings.max_sessions, max_age=settings.max_age
        ),
        tool_parser=settings.tool_parser,
        max_turns=settings.max_turns,
        max_seconds=settings.max_seconds,
        episodes=settings.at_once,
        security=own.model_copy(update={"token_env": TOKEN_ENV}),
    )
    return config.as_run().model_copy(update={"name": agents_run_id(config), "environment": environment, "reward": None})


async def open_run(redis: Redis, config: ServeConfig, settings: ServeAgents) -> Run:
    """Makes the run, or gives it the configuration of now. Only the API does it."""
    run_id, made = agents_run_id(config), run_config(config, settings)
    files = read_model_files(Path(config.model.path))
    if await redis.exists(Run(redis, run_id).key("meta")):
        return await Run.resume(redis, run_id, made, files, newest=False)
    return await Run.create(redis, run_id, made, files, newest=False)


async def find_run(redis: Redis, config: ServeConfig) -> Run:
    """Waits for the run. Raises UnavailableError."""
    return await Run.attach(redis, agents_run_id(config), _WAIT_SECONDS)


def agents_run_id(config: ServeConfig) -> str:
    return f"{config.name}-agents"
