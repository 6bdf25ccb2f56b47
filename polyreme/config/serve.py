"""The configuration of a training service: a base model, the engines that train it and sample from it, and the address.

Invariant: its sections are those of a run; what a service does not have (data, rewards, iterations) has no key.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from polyreme.config.base import NAME
from polyreme.config.load import load_as
from polyreme.config.model import ModelConfig
from polyreme.config.rollout import TransformersConfig, VllmConfig
from polyreme.config.run import RunConfig
from polyreme.config.section import Operational, Section
from polyreme.config.security import SecurityConfig
from polyreme.config.trainer import RECOMPUTE, ParallelConfig, Recompute


class ServeLearner(Section):
    """The learner."""

    parallel: Operational[ParallelConfig] = ParallelConfig()
    micro_batch_tokens: int = Field(
        8192, ge=1, description="Maximum tokens of one micro-batch. A longer sequence forms its own micro-batch."
    )
    recompute: Operational[Recompute | None] = Field(None, description=RECOMPUTE)
    max_models: Operational[int] = Field(
        32, ge=1, description="Maximum number of models in memory. The others are on disk, and come back with their next request."
    )
    resident_models: Operational[int] = Field(
        8, ge=1, description="Maximum number of models on the device, and in one pass. The others in memory are in the host's."
    )
    same_bits: bool = Field(
        True,
        description="Whether a model's weights have the same bits whatever other models train at the same time. The matrix"
        " products of a pass then run model by model. false: they run together, which is faster on accelerators and equal up to"
        " rounding.",
    )

    checkpoints_gib: Operational[float] = Field(
        100.0,
        gt=0,
        description="Maximum GiB of checkpoints. Beyond it, those without a name are deleted, the oldest first, and then a save"
        " fails. While checkpoints and models on disk have more, no new model is created.",
    )

    @model_validator(mode="after")
    def _is_possible(self) -> "ServeLearner":
        if self.parallel.nodes > 1:
            raise ValueError(
                f"`parallel.nodes` = {self.parallel.nodes} must be 1: the learner of a training service is on one machine"
            )
        if self.parallel.pipeline > 1 and self.recompute is not None:
            raise ValueError("`recompute` must be null with `parallel.pipeline` above 1: stages share the adapters of a pass")
        return self


class ServeSampler(Section):
    """The sampler."""

    engine: str = Field("vllm", description="Inference engine, as `rollout.engine` of a run.")
    max_model_len: int = Field(ge=2, description="Maximum length of prompt plus answer, in tokens.")
    max_num_seqs: int = Field(256, ge=1, description="Maximum number of answers that are sampled at once.")
    vllm: VllmConfig = VllmConfig()
    transformers: TransformersConfig = TransformersConfig()


class ServeAgents(Section):
    """Session addresses: agents with an OpenAI or Anthropic client sample from a model, whose client reads their exact tokens."""

    port: Operational[int] = Field(8451, ge=0, le=65535, description="Port of the session address, on `host`. 0: a free one.")
    url: Operational[str | None] = Field(
        None,
        pattern=r"^https?://[^\s/]+(/[^\s]*[^\s/])?$",
        description="URL by which agents reach the session address, if a proxy changes it. null: the API's host, with `port`.",
    )
    tool_parser: Literal["hermes", "llama3_json"] = Field("hermes", description="As `environment.tool_parser` of a run.")
    max_turns: int = Field(64, ge=1, description="Maximum number of turns of a session.")
    max_seconds: float = Field(600.0, gt=0, description="Maximum wall-clock seconds of one answer.")
    at_once: Operational[int] = Field(
        256, ge=1, description="Maximum number of turns that are answered at once. Further ones are refused."
    )
    max_sessions: Operational[int] = Field(
        4096, ge=1, description="Maximum number of sessions that are not ended, of all tenants."
    )
    max_age: Operational[float] = Field(
        3600.0, gt=0, description="Seconds after its last turn, or its reward, at which a session that nobody ends is dropped."
    )


class ServeQuota(Section):
    """Bounds of one tenant."""

    models: int = Field(16, ge=1, description="Maximum number of models that are not unloaded.")
    sessions: int = Field(
        4096, ge=1, description="Maximum number of sessions that are not finished, and of agents' sessions that are not ended."
    )
    requests: int = Field(4096, ge=1, description="Maximum number of requests that wait. Further ones are to be sent again.")


class ServeTenant(Section):
    """A tenant with an account."""

    name: str = Field(pattern=NAME, description="Its name on the page, in metrics and in logs.")
    token_env: str = Field(description="Environment variable with its API key, which begins with tml-.")
    quota: ServeQuota | None = Field(None, description="Its own bounds. null: `quota`.")


class ServeConfig(Section):
    """A training service."""

    name: Operational[str] = Field("serve", pattern=NAME, description="Name of the service: lower-case letters, digits, hyphens.")
    output_dir: Operational[Path] = Field(
        Path("runs"), description="Parent directory of the service's directory output_dir/name."
    )
    seed: int = Field(0, ge=0, description="Seed of the processes. Models and samples have their own.")
    device: Literal["cpu", "cuda", "npu"] = Field("cpu", description="Device type of learner and sampler.")
    base_model: Operational[str | None] = Field(
        None, description="Name by which clients ask for the base model. null: the name or the last part of model.path."
    )
    host: Operational[str | None] = Field(
        None,
        description="Address to serve the API on, such as 0.0.0.0. null: loopback. Another one needs `tenants` or"
        " `security.token_env`.",
    )
    port: Operational[int] = Field(8450, ge=0, le=65535, description="Port of the API. 0: a free one.")
    page_port: Operational[int] = Field(
        0, ge=0, le=65535, description="Port of the page (/ui) and of Prometheus' metrics (/metrics) on loopback. 0: a free one."
    )
    security: Operational[SecurityConfig | None] = Field(
        None,
        description="TLS of the API, and, without `tenants`, one token for all clients, which the SDK wants to begin with"
        " `tml-`. null: any key.",
    )
    tenants: Operational[list[ServeTenant]] = Field(
        [], description="Who may use the service, each with a key. []: everybody who reaches its port; each key is a tenant."
    )
    quota: Operational[ServeQuota] = Field(ServeQuota(), description="Bounds of each tenant.")
    max_restarts: Operational[int] = Field(
        20, ge=0, description="Maximum restarts of each process. The count resets after five minutes of healthy uptime."
    )
    model: ModelConfig
    learner: ServeLearner = ServeLearner()
    sampler: ServeSampler
    agents: ServeAgents | None = Field(None, description="Session addresses. null: none.")

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name

    @property
    def redis_dir(self) -> Path:
        """The folder of the service's own Redis and of its secrets."""
        return self.run_dir / "redis"

    @property
    def served_name(self) -> str:
        """The base model's name for clients."""
        return self.base_model or self.model.path.name

    def as_run(self) -> RunConfig:
        """A run with the same model and engines, of which these read the sections `model`, `rollout` and `trainer`."""
        length = self.sampler.max_model_len
        rollout = {**self.sampler.model_dump(), "max_new_tokens": length - 1}
        trainer = {
            "parallel": self.learner.parallel,
            "micro_batch_tokens": self.learner.micro_batch_tokens,
            "recompute": self.learner.recompute,
            "optimizer": {"lr": 1e-4},
            "lora": {"rank": 1},  # until the first model is created
        }
        unread = {"train": self.model.path, "max_prompt_tokens": 1}
        shared = {"name": self.name, "output_dir": self.output_dir, "seed": self.seed, "device": self.device, "model": self.model}
        unread_sizes = {"iterations": 1, "groups_per_iteration": 1, "group_size": 2}
        reward = {"rewards": [{"name": "exact"}]}
        return RunConfig.model_validate(
            {**shared, **unread_sizes, "data": unread, "reward": reward, "rollout": rollout, "trainer": trainer}
        )


def read_serve(path: Path, overrides: Iterable[str] = ()) -> ServeConfig:
    """Reads a service's YAML file, as `load_config` reads a run's. Raises ConfigError."""
    return load_as(ServeConfig, path, overrides)
