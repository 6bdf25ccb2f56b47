"""What the learner of the training service asks of an engine.

Invariant: imports no torch, so that the learner runs on the simulated engine without it.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import xxhash

from polyreme.config.trainer import LoraConfig
from polyreme_trainer.service.batch import BatchResult, LossCall
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.messages import AdamSettings, LoraOptions

LORA_ALPHA = 32.0
"""The output of an adapter of rank r is multiplied by LORA_ALPHA / r."""


class TenantEngine(Protocol):
    """Computes requests for the models of tenants, which it knows by name."""

    @property
    def most(self) -> int:
        """The largest number of models on the device, and of a pass."""

    @property
    def pass_bytes(self) -> int:
        """About the size of the batches that fit into one pass, as they are in the log."""

    @property
    def models(self) -> Mapping[str, LoraConfig | None]:
        """The adapters of every model; None: all parameters."""

    @property
    def critics(self) -> Collection[str]:
        """The models that are critics: adapters with a value head."""

    def steps(self, name: str) -> int:
        """The optimizer steps of a model."""

    def create(self, name: str, lora: LoraConfig | None, seed: int, critic: bool = False) -> None:
        """Creates a model: adapters that change nothing yet, or with None the base model's own weights, to be trained. The values
        of a new critic are 0. Raises TenantError for adapters or a critic that the base model cannot have."""

    def save(self, name: str, folder: Path, gradient: bool) -> None:
        """Writes a model's weights and moments into an empty directory. `gradient`: also the gradient since the last optimizer
        step."""

    def load(self, name: str, folder: Path, lora: LoraConfig | None, steps: int, critic: bool = False) -> None:
        """Gives a model the state that `save` wrote, and creates the model if there is none.

        Args:
            lora: the adapters of the state.
            steps: the optimizer steps of the state; 0: without its moments.
            critic: whether it is a critic's.

        Raises:
            ModelLostError: the directory was deleted meanwhile.
        """

    def remove(self, name: str) -> None:
        """Forgets a model, if there is one."""

    def forward(self, calls: Mapping[str, LossCall]) -> Mapping[str, BatchResult | TenantError]:
        """The results of one batch for each of several models, or why a batch is impossible."""

    def forward_backward(self, calls: Mapping[str, LossCall]) -> Mapping[str, BatchResult | TenantError]:
        """As `forward`, and adds each loss's gradient to that of its model's next optimizer step."""

    def optim_step(self, name: str, given: AdamSettings) -> tuple[float, int]:
        """Takes an optimizer step of a model. Without a gradient it is one with a gradient of zero.

        Returns:
            The gradient's norm before clipping, and the number of steps.

        Raises:
            TenantError: the gradient is not finite, and nothing but it has changed: it is zero now.
            ModelLostError: the new weights are not finite.
        """

    def write_sampler_weights(self, name: str, folder: Path) -> None:
        """Fills an empty directory with a model: its adapters in PEFT's format, or all weights."""


def lora_of(request: Mapping[str, Any], lane: str) -> tuple[LoraConfig | None, int]:
    """The adapters that a client asks for, and their seed. Rank 0, or no adapters: all parameters. Raises TenantError for no
    layers, and for a critic without adapters."""
    fields, is_critic = request["lora"], request.get("critic", False)
    if (fields is None or fields["rank"] == 0) and is_critic:
        raise TenantError("not supported: a critic with lora_config.rank = 0, all parameters; expected a rank of at least 1")
    if fields is None or fields["rank"] == 0:
        return None, 0
    given = LoraOptions.model_validate(fields)
    if not (given.train_attn or given.train_mlp):
        raise TenantError(
            "not supported: lora_config with train_attn = false and train_mlp = false; the output layer has no adapters"
        )
    attention, mlp = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
    targets = None if given.train_attn and given.train_mlp else attention if given.train_attn else mlp
    seed = xxhash.xxh3_64_intdigest(lane.encode()) >> 1 if given.seed is None else given.seed
    return LoraConfig(rank=given.rank, alpha=LORA_ALPHA, targets=targets), seed
