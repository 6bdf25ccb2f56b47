"""The canary of a version: fixed tokens, and the log-probabilities that the learner computes for them. Pure.

Invariant: a replica passes when the mean absolute difference of its log-probabilities is at most the limit. A value that is not a
number, on either side, fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from polyreme.api.v1 import weights_pb2 as pb

LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Default limit by dtype of the weights, in nats: several times the effect of rounding, and far below that of wrong weights."""


def limit_of(dtype: str, chosen: float | None = None) -> float:
    """The limit for weights of a dtype, in nats: the chosen one, or the default."""
    return LIMITS[dtype] if chosen is None else chosen


class CanaryError(ValueError):
    """A replica's log-probabilities differ from those of the version, or are missing."""


@dataclass(frozen=True)
class Canary:
    """`ids`: tokens [n]; `logprobs`: of ids[1:] given the tokens before, at temperature 1, in nats [n - 1]; `limit`, in nats."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    limit: float

    def check(self, logprobs: Sequence[float]) -> float:
        """The mean absolute difference, in nats. Raises CanaryError when it exceeds the limit."""
        if len(logprobs) != len(self.logprobs):
            raise CanaryError(f"expected {len(self.logprobs)} log-probabilities; found {len(logprobs)}")
        difference = float(np.abs(np.subtract(logprobs, self.logprobs, dtype=np.float64)).mean())
        if not difference <= self.limit:
            raise CanaryError(
                f"expected log-probabilities within {self.limit:g} of the learner's; found {difference:.4g} on average"
            )
        return difference

    def to_proto(self) -> pb.Canary:
        return pb.Canary(ids=self.ids, logprobs=self.logprobs, limit=self.limit)

    @classmethod
    def from_proto(cls, message: pb.Canary) -> "Canary":
        return cls(tuple(message.ids), tuple(message.logprobs), message.limit)
