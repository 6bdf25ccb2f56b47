"""The section `trainer`: ranks, optimizer, warm start, checkpoints.

Invariant: the ranks divide evenly over the machines, and the ranks that share a tensor share a machine.
"""

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyreme.config.data import DataSource
from polyreme.config.named_input import MODEL, TRAINING
from polyreme.config.section import Operational, Section


class ParallelConfig(Section):
    tensor: Operational[int] = Field(1, ge=1, description="Tensor-parallel size: ranks that share each layer's weights.")
    data: Operational[int] = Field(
        1,
        ge=1,
        description="Data-parallel size: copies of the model that share an iteration's samples and the optimizer's state.",
    )
    pipeline: Operational[int] = Field(
        1, ge=1, description="Pipeline-parallel size: stages that share the layers evenly, one after the other."
    )
    virtual_pipeline: Operational[int] = Field(
        1,
        ge=1,
        description="Virtual pipeline size: number of virtual stages of each stage, which take turns. Above 1, megatron-core's"
        " interleaved schedule is used.",
    )
    context: Operational[int] = Field(
        1, ge=1, description="Context-parallel size: ranks that share the tokens of each micro-batch, cut within every sequence."
    )
    expert: Operational[int] = Field(
        1,
        ge=1,
        description="Expert-parallel size: data and context ranks that share the experts of each layer, for models with experts.",
    )
    expert_tensor: Operational[int | None] = Field(
        None, ge=1, description="Expert-tensor-parallel size: ranks that share each expert's weights. Default: `tensor`."
    )
    nodes: Operational[int] = Field(
        1, ge=1, le=10**5, description="Machines that share the ranks evenly. All but the trainer's run `polyreme learner`."
    )
    threads: Operational[int] = Field(1, ge=1, description="Compute threads per learner rank on CPU.")

    @model_validator(mode="after")
    def _divides(self) -> "ParallelConfig":
        if self.pipeline > 1:
            if self.pipeline % self.nodes:
                raise ValueError(
                    f"`pipeline` = {self.pipeline} must be a multiple of `nodes` = {self.nodes}: a stage is on one machine"
                )
        elif self.data % self.nodes:
            raise ValueError(
                f"`data` = {self.data} must be a multiple of `nodes` = {self.nodes}: all machines have equally many ranks, and a"
                " tensor-parallel group is on one machine"
            )
        if self.expert_tensor is None and self.copies % self.expert:
            raise ValueError(
                f"`expert` = {self.expert} must divide the {self.copies} ranks (data x context) that share the experts"
            )
        if self.expert_tensor is not None:
            self._check_expert_tensor(self.expert_tensor)
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"`virtual_pipeline` = {self.virtual_pipeline} requires `pipeline` of at least 2: it divides the layers of each"
                " stage"
            )
        return self

    def _check_expert_tensor(self, expert_tensor: int) -> None:
        machines = self.nodes if self.pipeline == 1 else 1  # that share a stage's ranks
        ranks, needed = self.tensor * self.copies // machines, self.expert * expert_tensor
        if ranks % needed:
            raise ValueError(
                f"`expert` x `expert_tensor` = {needed} must divide the {ranks} ranks of each stage on a machine: they share the"
                " experts among themselves"
            )
        if needed % self.tensor and self.tensor % needed:
            raise ValueError(
                f"of `expert` x `expert_tensor` = {needed} and `tensor` = {self.tensor}, one must divide the other: they cut the"
                " same ranks into groups"
            )

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.copies

    @property
    def copies(self) -> int:
        """How many ranks hold each weight, ignoring expert ranks: data x context ranks. They share the optimizer's state."""
        return self.data * self.context

    @property
    def layout(self) -> str:
        """The ranks in words."""
        virtual = f" (virtual {self.virtual_pipeline})" if self.virtual_pipeline > 1 else ""
        stages = f"pipeline {self.pipeline}{virtual} x " if self.pipeline > 1 else ""
        context = f"context {self.context} x " if self.context > 1 else ""
        sizes = {"expert": self.expert if self.expert > 1 else None, "expert tensor": self.expert_tensor}
        experts = "".join(f" ({name} {size})" for name, size in sizes.items() if size is not None)
        return f"tensor {self.tensor} x {stages}{context}data {self.data}{experts}"

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes


class OptimizerConfig(Section):
    lr: float = Field(gt=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of a linear or cosine schedule.")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="Learning rate schedule after the warm-up.")
    warmup: int = Field(0, ge=0, description="Iterations of linear warm-up; in a stage, steps.")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's decay rate of the first moment.")
    beta2: float = Field(0.999, ge=0, lt=1, description="Adam's decay rate of the second moment.")
    eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    clip_grad: float = Field(1.0, ge=0, description="Maximum global gradient norm. 0: no clipping.")


Recompute = Literal["selective", "full"]
RECOMPUTE = (
    "Activations that backward passes recompute. selective: those inside each MLP. full: those of every layer. null: none."
)


LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Section):
    """Low-rank adapters on linear layers with frozen weights (Hu et al. 2021)."""

    rank: int = Field(16, ge=1, description="Rank of every adapter.")
    alpha: float = Field(32.0, gt=0, description="Scale of the adapters: their output is multiplied by `alpha / rank`.")
    rslora: bool = Field(False, description="true: multiply by `alpha / sqrt(rank)` instead (rank-stabilized LoRA).")
    targets: list[LoraTarget] | None = Field(
        None,
        min_length=1,
        description="Hugging Face names of the linear layers with an adapter. null: all layers; in a model with experts, those"
        " of attention.",
    )

    @property
    def scale(self) -> float:
        """The factor of the adapters' output."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class OffloadConfig(Section):
    """Offload of state that is not in use to the host's memory. The weights have the same bits with every setting."""

    optimizer: Operational[bool] = Field(
        False, description="Moments and full-precision weights are on the device only during optimizer steps, in parts of 1 GiB."
    )
    idle_models: Operational[bool] = Field(
        False, description="Only the model that computes is on the device: actor, critic, reference or moving average."
    )

    @property
    def is_set(self) -> bool:
        """Whether anything is offloaded."""
        return self.optimizer or self.idle_models


SAVE_MINUTES = 10.0
"""Default minutes between checkpoints: the loss when a run or a stage is killed."""


class CommonTrainer(Section):
    """The ranks and checkpoints of a run or a stage."""

    parallel: ParallelConfig = ParallelConfig()
    micro_batch_tokens: int = Field(
        8192, ge=1, description="Maximum tokens per micro-batch. A longer sample or row gets its own micro-batch."
    )
    recompute: Operational[Recompute | None] = Field(None, description=RECOMPUTE)
    offload: OffloadConfig = OffloadConfig()
    optimizer: OptimizerConfig
    lora: LoraConfig | None = Field(
        None,
        description="Low-rank adapters: in every trained model, only the adapters and a value head are trained. null: all weights"
        " are trained.",
    )
    save_interval: Operational[int] = Field(
        0,
        ge=0,
        description="Iterations, or steps of a stage, between checkpoints. The last one is always saved. 0: see `save_minutes`.",
    )
    save_minutes: Operational[float | None] = Field(
        None,
        ge=0,
        description="Minutes after which another checkpoint follows the newest one, at the end of an iteration or a stage's step."
        f" 0: never. null: {SAVE_MINUTES:g} if `save_interval` is 0, else never.",
    )
    keep_checkpoints: Operational[int] = Field(2, ge=1, description="Number of checkpoints to keep.")

    @property
    def save_seconds(self) -> float:
        """Seconds between a checkpoint and the next one; 0: no checkpoint by time."""
        minutes = 0.0 if self.save_interval else SAVE_MINUTES
        return 60 * (minutes if self.save_minutes is None else self.save_minutes)


class MoeConfig(Section):
    """The balance of experts, in every optimizer step of a run or a stage."""

    aux_loss_coef: float | None = Field(
        None,
        ge=0,
        description="Coefficient of the load-balancing loss, which costs a forward pass per optimizer step. null:"
        " `router_aux_loss_coef` of config.json where its `output_router_logits` is true, else 0.",
    )
    z_loss_coef: float = Field(0.0, ge=0, description="Coefficient of the z-loss, which keeps the routers' logits small.")
    bias_update_rate: float = Field(
        0.0,
        ge=0,
        description="Change of each expert bias after an optimizer step, for models that have one. 0: the biases stay as they"
        " are. Pre-training often uses 0.001.",
    )

    @property
    def is_set(self) -> bool:
        """Whether the section configures a loss or an update."""
        return bool(self.aux_loss_coef or self.z_loss_coef or self.bias_update_rate)


class RunMoeConfig(MoeConfig):
    """Routers of models with experts."""

    replay_routes: bool = Field(
        False,
        description="Routing replay: the policy sends each sampled token to the experts that the replica chose. The engine must"
        " report them.",
    )


class CriticConfig(Section):
    """The critic of an algorithm that has one (preset ppo). It shares the actor's ranks."""

    path: Annotated[Path | None, MODEL] = Field(
        None,
        description="Hugging Face directory or name of a sequence classifier or language model. null: start from the actor's"
        " weights after the warm start.",
    )
    optimizer: OptimizerConfig | None = Field(None, description="The critic's optimizer. null: the actor's settings.")
    warmup_iterations: int = Field(
        0, ge=0, description="Number of initial iterations that train only the critic. The actor's schedule begins after them."
    )


class SftPhase(Section):
    """One phase of supervised training before the first iteration, on the learner's ranks."""

    data: Annotated[Path | tuple[Path | DataSource, ...], TRAINING] = Field(
        description="As data.train: rows with the prompt column and a `response` column, or `messages` with a whole conversation."
    )
    steps: int = Field(ge=1, description="Number of optimizer steps.")
    batch_size: int = Field(ge=1, description="Rows per step.")
    lr: float = Field(gt=0, description="Peak learning rate.")
    warmup: int = Field(0, ge=0, description="Steps of linear warm-up.")
    cooldown: int = Field(0, ge=0, description="Final steps over which the rate falls linearly to 2%.")
    beta2: float = Field(0.98, ge=0, lt=1, description="Adam's decay rate of the second moment.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay.")


class TrainerConfig(CommonTrainer):
    moe: RunMoeConfig = RunMoeConfig()
    critic: CriticConfig = CriticConfig()
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay per iteration of the moving average of the actor's weights, which is exported in addition. null:"
        " none.",
    )
    sft: list[SftPhase] = Field([], description="Phases of the warm start, which run once before the first iteration.")
    straggler_timeout: float = Field(
        600.0,
        gt=0,
        description="Seconds after which an unfinished attempt at a group expires while a plan waits for it. Pauses of a token"
        " budget do not count.",
    )
    orchestrators: Operational[int] = Field(
        1,
        ge=1,
        description="Orchestrator processes, which share the groups by index. More than 1 only where one needs a whole core: see"
        " [at scale](../design.md#at-scale).",
    )
    max_restarts: Operational[int] = Field(
        3,
        ge=0,
        description="Maximum restarts per process: each server, the run's own Redis, the trainer, the orchestrator, the learner"
        " (all ranks together). The count resets after five minutes of healthy uptime.",
    )
