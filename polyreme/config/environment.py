"""The section `environment`: what answers the policy, over several turns, and the resources of the environment service.

Invariant: every episode is bounded in turns, tokens and seconds.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from polyreme.config.section import Operational, Section
from polyreme.config.security import SecurityConfig


class EnvironmentConfig(Section):
    file: Path = Field(description="Python file with a class that has `reset`, and `step` or tools.")
    name: str | None = Field(None, description="Name of the class in `file`. Required when there are several.")
    options: dict[str, Any] = Field({}, description="Arguments of the class.")
    tool_parser: Literal["hermes", "llama3_json"] = Field(
        "hermes",
        description="How the model writes a call of a tool, by vLLM's name: `hermes` for the JSON in `<tool_call>` tags of Qwen2.5, Qwen3 and Hermes.",
    )
    max_turns: int = Field(16, ge=1, description="Maximum number of turns of an episode.")
    max_seconds: float = Field(600.0, gt=0, description="Maximum wall-clock seconds of an episode.")
    step_timeout: float = Field(30.0, gt=0, description="Maximum seconds of one call of `reset` or `step`.")
    max_message_chars: int = Field(
        65_536, ge=1, description="Maximum characters that one call may return. Longer results of tools are cut."
    )
    tries: int = Field(
        3, ge=1, description="How often an episode may begin, when its server or process is lost, in an attempt at a group."
    )
    episodes: Operational[int] = Field(256, ge=1, description="Maximum number of episodes that a server plays at once.")
    workers: Operational[int] = Field(
        1, ge=1, description="Worker processes of a server. Each plays several episodes, one call after the other."
    )
    worker_memory_mib: Operational[int] = Field(
        4096, ge=64, description="Memory limit of each worker process (RLIMIT_DATA), in MiB."
    )
    worker_environment: Operational[list[str]] = Field(
        [],
        description="Names of environment variables to pass to worker processes in addition to the usual ones, such as an API key.",
    )
    start_timeout: Operational[float] = Field(
        60.0, gt=0, description="Maximum seconds for loading the environment, and without any server."
    )
    security: Operational[SecurityConfig | None] = Field(
        None, description="TLS and tokens of both ports. null: plain connections, for loopback only."
    )
