"""A user's own advantages and loss in place of the recipe's.

Invariant: everything around the two functions stays the recipe's: shaping, KL in the reward, distillation, aggregation, the critic's
loss. What a user's function gives back is checked before it is trained with.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyreme.errors import RunFailedError
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import Advantages, Bool, Float64, TokenBatch, sequence_sums
from polyreme_trainer.algorithms.estimation import Rewards
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.metrics import Metrics


@dataclass(frozen=True)
class OwnAlgorithm(Algorithm):
    """A recipe with functions of the user's.

    Args:
        source: names the functions' file or module in errors.
        own_advantages: `advantages(batch)`. The batch's scores are shaped, `token_rewards` are process
            rewards, a part of the score, minus the KL penalty. Gives back numbers
            [t], or with a critic the pair (advantages [t], returns [t]).
        own_loss: `loss(inputs)`. Gives back a scalar tensor that depends on `inputs.logprobs`, made of sums with `inputs.weight`, and
            metrics: name -> (sum, weight).
    """

    source: str
    own_advantages: Callable[[TokenBatch], Any] | None
    own_loss: Callable[[LossInputs], Any] | None

    def estimate(self, batch: TokenBatch, rewards: Rewards) -> tuple[Float64, Float64 | None]:
        """Raises RunFailedError for what is not finite numbers [t]."""
        if self.own_advantages is None:
            return super().estimate(batch, rewards)
        result = self.own_advantages(replace(batch, score=rewards.scores, token_rewards=rewards.beside.astype(np.float32)))
        pair = result if isinstance(result, tuple) else (result,)
        if len(pair) != 1 + self.needs.critic:
            expected = "a pair (advantages, returns), since there is a critic" if self.needs.critic else "one array"
            raise self._wrong("advantages", expected, f"{len(pair)}")
        arrays = [self._numbers(batch, value) for value in pair]
        return arrays[0], arrays[1] if self.needs.critic else None

    def has_gradient(self, batch: TokenBatch, advantages: Advantages) -> Bool:
        """Of a user's loss nothing is known: all sequences that are not masked out."""
        if self.own_loss is None:
            return super().has_gradient(batch, advantages)
        return sequence_sums(batch.trained & (advantages.weight > 0), batch.offsets) > 0

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """Raises RunFailedError for what is not a scalar with a gradient, and metrics."""
        if self.own_loss is None:
            return super().loss(inputs)
        result = self.own_loss(inputs)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise self._wrong("loss", "a pair (scalar tensor, metrics)", type(result).__name__)
        value, metrics = result
        if not (isinstance(value, Tensor) and value.shape == () and value.is_floating_point()):
            shape = f"shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
            raise self._wrong("loss", "a scalar floating-point tensor", shape)
        if torch.is_grad_enabled() and not value.requires_grad:
            raise self._wrong("loss", "a tensor that depends on inputs.logprobs", "one without gradient")
        if not torch.isfinite(value):
            raise self._wrong("loss", "a finite loss", str(value.item()))
        return value, self._metrics(metrics)

    def _metrics(self, metrics: Any) -> Metrics:
        if not (isinstance(metrics, Mapping) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in metrics.values())):
            raise self._wrong("loss", "metrics: a mapping of names to (sum, weight)", repr(metrics)[:80])
        return {name: (torch.as_tensor(a).detach(), torch.as_tensor(b).detach()) for name, (a, b) in metrics.items()}

    def _numbers(self, batch: TokenBatch, value: Any) -> Float64:
        array = np.asarray(value)
        if array.shape != (batch.tokens,) or array.dtype.kind not in "fiu":
            raise self._wrong("advantages", f"numbers of shape ({batch.tokens},)", f"{array.dtype} of shape {array.shape}")
        if not np.isfinite(array[batch.trained]).all():
            raise self._wrong("advantages", "a finite number for every trained token", "some that are not")
        return np.where(batch.trained, array, 0.0).astype(np.float64)

    def _wrong(self, function: str, expected: str, found: str) -> RunFailedError:
        return RunFailedError(f"{expected} from `{function}` in {self.source}", found, "Fix the function.")
