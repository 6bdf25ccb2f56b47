"""The one schema of a run. Every key is read by some part of the system, and an unknown one is an error."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: Path = Field(description="Hugging Face directory: config.json, tokenizer files, safetensors.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of weights and compute, in trainer and replicas.")


class DataConfig(Section):
    train: Path = Field(description="JSON lines: one prompt each.")
    eval: Path | None = Field(None, description="JSON lines of held-out prompts; none: no evaluation.")
    prompt_key: str = Field("prompt", description="Column with the prompt: a string, or a list of chat messages.")
    label_key: str = Field("answer", description="Column with the reference answer; a row may lack it.")
    template: Literal["chat", "none"] = Field(
        "chat", description="chat: the tokenizer's template; none: the text as it is, behind the tokenizer's BOS."
    )
    system: str | None = Field(None, description="System message in front of every prompt.")
    max_prompt_tokens: int = Field(1024, ge=1)
    overlong: Literal["filter", "error"] = Field("filter", description="What to do with a prompt beyond max_prompt_tokens.")


class RolloutConfig(Section):
    replicas: int = Field(1, ge=1, description="How many `polyreme up` starts, and how many a run waits for.")
    tensor_parallel: int = Field(1, ge=1)
    max_new_tokens: int = Field(ge=1)
    max_model_len: int = Field(ge=2, description="Longest prompt plus response, in tokens.")
    temperature: float = Field(
        1.0, ge=0.01, le=2, description="Of sampling for training, within what vLLM takes as it is; the learner uses the same."
    )
    max_num_seqs: int = Field(256, ge=1, description="Samples a replica decodes at once.")
    kv_cache_mib: int = Field(256, ge=1, description="Key-value cache of a CPU replica; GPUs use gpu_memory_utilization.")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    threads: int = Field(1, ge=1, description="OpenMP threads of each engine worker on CPU.")
    start_timeout: float = Field(300.0, gt=0, description="Seconds until enough replicas must be registered.")
    chunk_timeout: float = Field(60.0, gt=0, description="Seconds a generation stream may be silent.")


class EndpointSecurity(Section):
    """Whom an HTTPS endpoint is trusted from, and who calls it. Files and token are read where the reward service starts."""

    ca: Path | None = Field(None, description="PEM: whom its certificate is trusted from; none: whom this system trusts.")
    certificate: Path | None = Field(None, description="PEM: the certificate to show, where it asks for one.")
    key: Path | None = Field(None, description="PEM: its private key, without a password.")
    token_env: str | None = Field(None, description="Environment variable with the bearer token to send.")

    @model_validator(mode="after")
    def _pairs(self) -> "EndpointSecurity":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("`certificate` and `key` go together")
        return self


class RewardSpec(Section):
    """One reward: built in or installed (`name` alone), a Python function (`file` or `module`), an HTTP endpoint (`url`), or a
    Hugging Face sequence classifier (`model`)."""

    name: str | None = Field(
        None, description="Of a built-in or installed reward; beside another source, what its part is called."
    )
    file: Path | None = Field(None, description="A Python file with a reward function.")
    module: str | None = Field(None, description="An importable Python module with a reward function.")
    function: str | None = Field(None, description="The function in `file` or `module`, when there are several.")
    url: str | list[str] | None = Field(None, description="An HTTP endpoint, or several that share the load.")
    protocol: Literal["paddlenlp", "openrlhf", "native"] | None = Field(None, description="What the endpoint speaks.")
    security: EndpointSecurity | None = Field(None, description="Of an https endpoint; none: as the system trusts, no token.")
    model: Path | None = Field(None, description="A Hugging Face directory of a sequence classifier: its output is the score.")
    weight: float = Field(1.0, description="The reward's value times this goes into the score.")
    options: dict[str, Any] = Field({}, description="Arguments of the reward.")

    @model_validator(mode="after")
    def _one_source(self) -> "RewardSpec":
        sources = [key for key in ("file", "module", "url", "model") if getattr(self, key)]
        if len(sources) > 1 or not (sources or self.name):
            raise ValueError("a reward needs one of `name` (built in or installed), `file`, `module`, `model` or `url`")
        if (self.url is None) != (self.protocol is None):
            raise ValueError("`url` and `protocol` go together")
        if self.function is not None and not (self.file or self.module):
            raise ValueError("`function` names a function in `file` or `module`")
        if self.security is not None and not (self.urls and all(url.startswith("https://") for url in self.urls)):
            raise ValueError("`security` is of a `url` with https://: a token would be readable on any other wire")
        return self

    @property
    def urls(self) -> list[str]:
        """The endpoints; none for other rewards."""
        return [self.url] if isinstance(self.url, str) else self.url or []

    @property
    def label(self) -> str:
        """What the reward's part of a score is called."""
        path = self.file.stem if self.file else self.model.name if self.model else None
        return self.name or path or self.module or ",".join(self.urls)


class SecurityConfig(Section):
    """Who may reach a service, and who it is. Files are read where a process starts: each machine has its own at these paths."""

    certificate: Path | None = Field(
        None,
        description="PEM: the server's certificate and those between it and the CA; turns TLS on. None: only for networks of yours.",
    )
    key: Path | None = Field(None, description="PEM: its private key, without a password.")
    ca: Path | None = Field(None, description="PEM: whom certificates are trusted from; none: whom this system trusts.")
    mutual: bool = Field(False, description="Clients need a certificate of `ca` too; Polyreme's own show `certificate`.")
    server_name: str | None = Field(
        None, description="The name that all servers' certificates carry; none: each the address it is reached at."
    )
    token_env: str | None = Field(None, description="Environment variable with the bearer token that every call must carry.")

    @model_validator(mode="after")
    def _has_ca(self) -> "SecurityConfig":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("`certificate` and `key` go together")
        if self.certificate is None and (self.mutual or self.token_env is None):
            raise ValueError("`security` needs `certificate` and `key`, or `token_env`")
        if self.mutual and self.ca is None:
            raise ValueError("`mutual` needs `ca`: else everybody with a certificate of a public CA could call")
        return self


class RewardConfig(Section):
    rewards: list[RewardSpec] = Field(min_length=1)
    choose_by: str | None = Field(
        None, description="Column that names a row's rewards, one or a list; null: all score every row."
    )
    item_timeout: float = Field(10.0, gt=0, description="Seconds for one item, queueing excluded.")
    workers: int = Field(1, ge=1, description="Worker processes for rewards that run in this service.")
    worker_memory_mib: int = Field(4096, ge=64, description="Data memory of each worker process.")
    worker_environment: list[str] = Field(
        [],
        description="Variables that worker processes get beside the usual ones, such as an API key that a Python reward reads.",
    )
    queue: int = Field(16384, ge=1, description="Items a reward server takes in at once; it refuses more.")
    special_tokens: list[str] = Field([], description="Taken out of responses on foreign HTTP wires, which carry them as text.")
    security: SecurityConfig | None = Field(None, description="TLS and tokens on both ports; none: plain, for loopback.")
    attempts: int = Field(3, ge=1, description="How often the orchestrator asks for a group's scores before the attempt fails.")
    start_timeout: float = Field(
        60.0, gt=0, description="Seconds until rewards are loaded, and until a server must be registered."
    )

    @model_validator(mode="after")
    def _distinct(self) -> "RewardConfig":
        labels = [spec.label for spec in self.rewards]
        if twice := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"two rewards are called {', '.join(sorted(twice))}; give one another `name`")
        return self


class ParallelConfig(Section):
    tensor: int = Field(1, ge=1)
    data: int = Field(1, ge=1)
    nodes: int = Field(
        1, ge=1, description="Machines that share the ranks evenly; each but the trainer's runs `polyreme learner`."
    )
    threads: int = Field(1, ge=1, description="Compute threads of each learner rank on CPU.")

    @model_validator(mode="after")
    def _divides(self) -> "ParallelConfig":
        if self.data % self.nodes:
            raise ValueError(
                f"`data` = {self.data} must be a multiple of `nodes` = {self.nodes}: machines have equal shares, and tensor ranks share one"
            )
        return self

    @property
    def world_size(self) -> int:
        return self.tensor * self.data

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes


class OptimizerConfig(Section):
    lr: float = Field(gt=0)
    min_lr: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = Field(0, ge=0, description="Iterations of linear warm-up.")
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.999, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0, description="Largest global gradient norm; 0: no clipping.")


class AlgorithmConfig(Section):
    name: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    kl_coef: float = Field(0.0, ge=0, description="Weight of the k3 KL to the reference policy; 0: no reference model is kept.")
    normalize_std: bool = Field(True, description="Divide a group's advantages by their standard deviation (GRPO); no: Dr.GRPO.")
    minibatches: int = Field(1, ge=1, description="Optimizer steps per pass over an iteration's samples.")
    epochs: int = Field(1, ge=1)
    importance_sampling: Literal["auto", "token", "none"] = Field(
        "auto",
        description="Correction for samples of other policies: truncated weights per token; auto: where max_staleness > 0.",
    )
    importance_cap: float = Field(2.0, ge=1, description="Largest importance weight.")


class SftPhase(Section):
    """One stretch of supervised training on the trainer's ranks, before the first iteration."""

    data: Path = Field(description="JSON lines with the prompt and a `response` column.")
    steps: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    lr: float = Field(gt=0)
    warmup: int = Field(0, ge=0)
    cooldown: int = Field(0, ge=0, description="Steps at the end over which the rate falls linearly to 2%.")
    beta2: float = Field(0.98, ge=0, lt=1)
    weight_decay: float = Field(0.01, ge=0)


class TrainerConfig(Section):
    parallel: ParallelConfig = ParallelConfig()
    micro_batch_tokens: int = Field(8192, ge=1, description="Padded tokens of one micro-batch; a longer sample goes alone.")
    optimizer: OptimizerConfig
    sft: list[SftPhase] = Field([], description="Run in order, once, when a run starts fresh.")
    save_interval: int = Field(0, ge=0, description="Iterations between checkpoints; 0: only the last. The last is always saved.")
    keep_checkpoints: int = Field(2, ge=1)
    straggler_timeout: float = Field(600.0, gt=0, description="Seconds after which a group's unfinished attempt expires.")
    max_restarts: int = Field(
        3,
        ge=0,
        description="How often each process of a run is started again when it dies: every server, the run's own Redis, the trainer, its orchestrator, its learner (all ranks as one). Five minutes in order, and earlier deaths are forgotten.",
    )


class RunConfig(Section):
    name: str = Field("run", pattern=r"^[a-z0-9][a-z0-9-]*$")
    output_dir: Path = Field(Path("runs"), description="The run directory is output_dir/name.")
    seed: int = Field(0, ge=0)
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    iterations: int = Field(ge=1)
    groups_per_iteration: int = Field(ge=1)
    group_size: int = Field(ge=1)
    max_staleness: int = Field(0, ge=0, description="Iterations a sample may lag behind; 0 is on-policy.")
    max_attempts: int = Field(3, ge=1, description="Attempts at a group before it counts as failed.")
    max_failed_fraction: float = Field(
        0.2, ge=0, le=1, description="Failed groups in a window of 50 beyond which a run stops admitting and fails."
    )
    eval_interval: int = Field(
        0, ge=0, description="Iterations between evaluations; 0: only before the first and after the last."
    )
    eval_samples: int = Field(500, ge=1, description="Held-out prompts per evaluation.")
    eval_hold: float = Field(
        300.0, gt=0, description="Seconds for which an evaluation may keep replicas from newer versions, where max_staleness > 0."
    )
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    security: SecurityConfig | None = Field(
        None, description="Of every service's ports, and of the reward service's unless it has its own."
    )

    @model_validator(mode="before")
    @classmethod
    def _secure_rewards_too(cls, tree: Any) -> Any:
        reward = tree.get("reward") if isinstance(tree, dict) else None
        if isinstance(reward, dict) and tree.get("security") is not None and reward.get("security") is None:
            return {**tree, "reward": {**reward, "security": tree["security"]}}
        return tree

    @model_validator(mode="after")
    def _fits(self) -> "RunConfig":
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        if longest > self.rollout.max_model_len:
            raise ValueError(
                f"data.max_prompt_tokens + rollout.max_new_tokens = {longest} must fit rollout.max_model_len = {self.rollout.max_model_len}"
            )
        if self.algorithm.name == "grpo" and self.group_size < 2:
            raise ValueError("group_size must be at least 2: GRPO compares the samples of a group")
        if self.algorithm.minibatches > self.groups_per_iteration:
            raise ValueError(
                f"algorithm.minibatches = {self.algorithm.minibatches} is more than groups_per_iteration = {self.groups_per_iteration}: a minibatch has whole groups"
            )
        if self.trainer.save_interval > self.iterations:
            raise ValueError(
                f"trainer.save_interval = {self.trainer.save_interval} would never fire in {self.iterations} iterations"
            )
        if self.eval_interval > self.iterations:
            raise ValueError(f"eval_interval = {self.eval_interval} would never fire in {self.iterations} iterations")
        if self.trainer.optimizer.min_lr > self.trainer.optimizer.lr:
            raise ValueError("trainer.optimizer.min_lr is above trainer.optimizer.lr")
        return self

    @property
    def run_dir(self) -> Path:
        return self.output_dir / self.name

    def evaluates(self, version: int) -> bool:
        """Whether the schedule asks for an evaluation of `version`; the first version there is gets one in any case."""
        scheduled = version == self.iterations or (self.eval_interval > 0 and version % self.eval_interval == 0)
        return self.data.eval is not None and scheduled

    @property
    def holds_versions(self) -> bool:
        """Whether training could leave a version that is being evaluated; on-policy it gets no samples to do so."""
        return self.data.eval is not None and self.max_staleness > 0

    def holds(self, version: int) -> bool:
        """Whether replicas are kept at `version` until it is evaluated."""
        return self.holds_versions and self.evaluates(version)

    @property
    def importance_cap(self) -> float | None:
        """The largest importance weight of a token in training; None: samples are taken for the trained policy's own."""
        algorithm, stale = self.algorithm, self.max_staleness > 0
        corrects = algorithm.importance_sampling == "token" or (algorithm.importance_sampling == "auto" and stale)
        return algorithm.importance_cap if corrects else None

    @property
    def samples_per_iteration(self) -> int:
        return self.groups_per_iteration * self.group_size

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)

    def fingerprint(self) -> str:
        """Digest (16 hex digits) of what decides the trained weights, for a resume that must repeat them.

        Left out: how long the run is, unless the learning rate depends on it, where it writes, how it is served and watched.
        """
        fields = self.model_dump(mode="json")
        lasting = () if self.trainer.optimizer.schedule == "constant" else ("iterations",)
        for dotted in set(_NOT_TRAINED_ON) - set(lasting):
            *parents, last = dotted.split(".")
            nodes = [fields]
            for parent in parents:
                found = [node[parent] for node in nodes]
                nodes = [one for each in found for one in (each if isinstance(each, list) else [each])]
            for node in nodes:
                del node[last]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


_NOT_TRAINED_ON = (
    *("name", "output_dir", "iterations", "eval_interval", "eval_samples", "eval_hold", "data.eval"),
    *(
        "rollout.replicas",
        "rollout.start_timeout",
        "rollout.chunk_timeout",
        "reward.workers",
        "reward.worker_memory_mib",
        "reward.worker_environment",
        "reward.queue",
        "reward.start_timeout",
        "reward.security",
        "reward.rewards.security",
        "security",
    ),
    *("trainer.save_interval", "trainer.keep_checkpoints", "trainer.max_restarts", "trainer.parallel.nodes"),
)
