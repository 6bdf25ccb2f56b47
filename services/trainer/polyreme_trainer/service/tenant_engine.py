"""What the learner of the training service asks of an engine, and the state of a tenant's model.

Invariant: imports no torch, so that the learner runs on the simulated engine without it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import xxhash

from polyreme.config.trainer import LoraConfig
from polyreme_trainer.service.batch import Batch, FloatArray
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.messages import AdamSettings, LoraOptions

if TYPE_CHECKING:
    from torch import Tensor

LORA_ALPHA = 32.0
"""The output of an adapter of rank r is multiplied by LORA_ALPHA / r."""
GRADIENT = "gradient"
"""Kind of state: the gradient since the last optimizer step."""


@dataclass(frozen=True)
class TenantState:
    """A tenant's model in the host's memory.

    Attributes:
        lora: its adapters; None: all parameters.
        steps: the optimizer steps that it has taken.
        tensors: KIND/NAME of a parameter -> this rank's part, of the parameter's shape.
    """

    lora: LoraConfig | None
    steps: int
    tensors: "Mapping[str, Tensor]"

    def of(self, kind: str) -> "dict[str, Tensor]":
        """The tensors of one kind by parameter."""
        prefix = f"{kind}/"
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors.items() if name.startswith(prefix)}

    def without(self, *kinds: str) -> "TenantState":
        """The state without some kinds of tensors."""
        return TenantState(self.lora, self.steps, {n: t for n, t in self.tensors.items() if n.partition("/")[0] not in kinds})


class TenantEngine(Protocol):
    """Computes requests, for one tenant's model after the other. The methods that compute use the model installed last."""

    @property
    def lora(self) -> LoraConfig | None:
        """The installed model's adapters; None: all parameters."""
        ...

    @property
    def steps(self) -> int:
        """The optimizer steps of the installed model."""
        ...

    def create(self, lora: LoraConfig | None, seed: int) -> None:
        """Installs a new model: adapters that change nothing yet, or with None the base model's own weights, to be trained."""
        ...

    def take(self) -> TenantState:
        """The installed model, as a copy."""
        ...

    def put(self, state: TenantState) -> None:
        """Installs a model in place of the one before."""
        ...

    def forward(self, batch: Batch, loss: str, options: Mapping[str, float]) -> tuple[Sequence[FloatArray], float]:
        """The log-probability of each target, float32 [n] for each sequence, and the loss. Raises TenantError for impossible sequences."""
        ...

    def forward_backward(self, batch: Batch, loss: str, options: Mapping[str, float]) -> tuple[Sequence[FloatArray], float]:
        """As `forward`, and adds the loss's gradient to that of the next optimizer step."""
        ...

    def optim_step(self, given: AdamSettings) -> tuple[float, int]:
        """Takes an optimizer step. Without a gradient it is one with a gradient of zero.

        Returns:
            The gradient's norm before clipping, and the number of steps.

        Raises:
            TenantError: the gradient is not finite, and nothing but it has changed: it is zero now. Or the new weights are not finite.
        """
        ...

    def write_sampler_weights(self, folder: Path) -> None:
        """Fills an empty directory with the installed model: its adapters in PEFT's format, or all weights."""
        ...


def lora_of(fields: Mapping[str, Any] | None, lane: str) -> tuple[LoraConfig | None, int]:
    """The adapters that a client asks for, and their seed. Rank 0, or no adapters: all parameters. Raises TenantError for no layers."""
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
