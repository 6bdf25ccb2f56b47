"""Replaces a recipe's advantages or loss with functions of the user.

Invariant: everything around the two functions comes from the recipe: shaping, KL in the reward, distillation, aggregation and the
critic's loss. The result of a user's function is checked before it is used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from polyreme.errors import RunFailedError
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import Advantages, Bool, Float64, TokenBatch, sequence_sums
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.metrics import Metrics
from polyreme_trainer.algorithms.rewards import Rewards


@dataclass(frozen=True)
class UserAlgorithm(Algorithm):
    """A recipe with functions of the user.

    Args:
        source: the functions' file or module, for errors.
        own_advantages: `advantages(batch)`. The batch's scores are shaped. Its `token_rewards` are the process rewards, which are
            part of the score, minus the KL penalty. Returns numbers [t], or with a critic the pair (advantages [t], returns [t]).
        own_loss: `loss(inputs)`. Returns a scalar tensor that depends on `inputs.logprobs` and is a sum weighted with
            `inputs.weight`, and metrics: name -> (sum, weight).
    """

    source: str
    own_advantages: Callable[[TokenBatch], object] | None
    own_loss: Callable[[LossInputs], object] | None

    def estimate(self, batch: TokenBatch, rewards: Rewards) -> tuple[Float64, Float64 | None]:
        """As `Algorithm.estimate`. Raises RunFailedError when the user's result is not finite numbers [t]."""
        if self.own_advantages is None:
            return super().estimate(batch, rewards)
        result = self.own_advantages(
            replace(batch, score=rewards.scores, token_rewards=rewards.process_minus_kl.astype(np.float32))
        )
        pair = result if isinstance(result, tuple) else (result,)
        if len(pair) != 1 + self.needs.critic:
            expected = "a pair (advantages, returns), since there is a critic" if self.needs.critic else "one array"
            raise self._wrong("advantages", expected, f"{len(pair)}")
        arrays = [self._numbers(batch, value) for value in pair]
        return arrays[0], arrays[1] if self.needs.critic else None

    def has_gradient(self, batch: TokenBatch, advantages: Advantages) -> Bool:
        """With a user's loss, every sequence that is not masked out may have a gradient."""
        if self.own_loss is None:
            return super().has_gradient(batch, advantages)
        return sequence_sums(batch.trained & (advantages.weight > 0), batch.offsets) > 0

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Metrics]:
        """As `Algorithm.loss`. Raises RunFailedError unless the user's result is a finite scalar with a gradient, and metrics."""
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

    def _metrics(self, metrics: object) -> Metrics:
        if not (isinstance(metrics, Mapping) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in metrics.values())):
            raise self._wrong("loss", "metrics: a mapping of names to (sum, weight)", repr(metrics)[:80])
        return {name: (torch.as_tensor(a).detach(), torch.as_tensor(b).detach()) for name, (a, b) in metrics.items()}

    def _numbers(self, batch: TokenBatch, value: object) -> Float64:
        array = np.asarray(value)
        if array.shape != (batch.tokens,) or array.dtype.kind not in "fiu":
            raise self._wrong("advantages", f"numbers of shape ({batch.tokens},)", f"{array.dtype} of shape {array.shape}")
        if not np.isfinite(array[batch.trained]).all():
            raise self._wrong("advantages", "a finite number for every trained token", "NaN or infinity")
        return np.where(batch.trained, array, 0.0).astype(np.float64)

    def _wrong(self, function: str, expected: str, found: str) -> RunFailedError:
        return RunFailedError(f"{expected} from `{function}` in {self.source}", found, "Fix the function.")
