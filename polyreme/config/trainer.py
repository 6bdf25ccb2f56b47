"""The section `trainer`: ranks, optimizer, warm start, checkpoints."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from polyreme.config.section import Operational, Section


class ParallelConfig(Section):
    tensor: int = Field(1, ge=1, description="Ranks that share each layer's weights.")
    data: int = Field(1, ge=1, description="Copies of the model that share an iteration's samples.")
    nodes: Operational[int] = Field(
        1, ge=1, description="Machines that share the ranks evenly. Each but the trainer's runs `polyreme learner`."
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
    lr: float = Field(gt=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of a linear or cosine schedule.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate after the warm-up.")
    warmup: int = Field(0, ge=0, description="Iterations of linear warm-up.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's decay of the gradient's mean.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Adam's decay of the gradient's square.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    clip_grad: float = Field(1.0, ge=0, description="Largest global gradient norm. 0: no clipping.")


class CriticConfig(Section):
    """The critic of an algorithm that has one (preset ppo). It shares the actor's ranks."""

    path: Path | None = Field(
        None,
        description="Hugging Face directory of a sequence classifier or language model. null: the actor's weights after the warm start.",
    )
    optimizer: OptimizerConfig | None = Field(None, description="The critic's own optimizer. null: as the actor's.")
    warmup_iterations: int = Field(0, ge=0, description="First iterations in which only the critic is trained.")


class SftPhase(Section):
    """One phase of supervised training on the trainer's ranks, before the first iteration."""

    data: Path = Field(description="JSON lines with the prompt and a `response` column.")
    steps: int = Field(ge=1, description="Optimizer steps of the phase.")
    batch_size: int = Field(ge=1, description="Rows per step.")
    lr: float = Field(gt=0, description="Peak learning rate.")
    warmup: int = Field(0, ge=0, description="Steps of linear warm-up.")
    cooldown: int = Field(0, ge=0, description="Steps at the end over which the rate falls linearly to 2%.")
    beta2: float = Field(0.98, ge=0, lt=1, description="Adam's decay of the gradient's square.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")


class TrainerConfig(Section):
    parallel: ParallelConfig = ParallelConfig()
    micro_batch_tokens: int = Field(
        8192, ge=1, description="Padded tokens of one micro-batch. A longer sample is a micro-batch of its own."
    )
    optimizer: OptimizerConfig
    critic: CriticConfig = CriticConfig()
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay of the moving average of the actor's weights, per iteration; it is exported beside them. null: none.",
    )
    sft: list[SftPhase] = Field([], description="Warm start: phases in order, once, when a run starts from iteration 0.")
    save_interval: Operational[int] = Field(
        0, ge=0, description="Iterations between checkpoints. 0: only the last, which is saved in any case."
    )
    keep_checkpoints: Operational[int] = Field(2, ge=1, description="Checkpoints that stay on disk.")
    straggler_timeout: float = Field(600.0, gt=0, description="Seconds after which a group's unfinished attempt expires.")
    max_restarts: Operational[int] = Field(
        3,
        ge=0,
        description="Restarts of each process that dies: every server, the run's own Redis, the trainer, its orchestrator, its learner (all ranks together). The count resets after five minutes of healthy uptime.",
    )
