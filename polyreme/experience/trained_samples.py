"""The learner's results for each sample of an iteration, which the trainer's records contain.

Invariant: encoding followed by decoding preserves every bit. The order is that of the iteration's plan and of each group's samples.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.errors import DataError
from polyreme.experience.metric_records import Line

_DIGITS = 5


@dataclass(frozen=True)
class TrainedSamples:
    """n samples with t tokens in total that the policy sampled.

    Attributes:
        advantages: float32 [t], 0 where the token was not trained on.
        weights: float32 [n], the sum of a sample's coefficients in the policy loss of an optimizer step, averaged over its steps.
        steps: int32 [n, epochs], the optimizer steps of the iteration, counted from 1, that trained the sample.
    """

    advantages: NDArray[np.float32]
    weights: NDArray[np.float32]
    steps: NDArray[np.int32]

    def encode(self) -> bytes:
        """The serialized protobuf TrainedSamples."""
        advantages, weights = (values.astype("<f4").tobytes() for values in (self.advantages, self.weights))
        message = pb.TrainedSamples(advantages=advantages, weights=weights, steps=self.steps.astype("<i4").tobytes())
        return bytes(message.SerializeToString())

    @classmethod
    def decode(cls, payload: bytes) -> "TrainedSamples":
        """Raises DataError when the payload is damaged."""
        try:
            message = pb.TrainedSamples.FromString(payload)
            weights = np.frombuffer(message.weights, "<f4")
            steps = np.frombuffer(message.steps, "<i4").reshape(len(weights), -1) if len(weights) else np.zeros((0, 0), np.int32)
            return cls(np.frombuffer(message.advantages, "<f4"), weights, steps)
        except (DecodeError, ValueError) as error:
            raise DataError(
                "a serialized TrainedSamples", f"{len(payload)} other bytes ({error})", "Report this as a bug."
            ) from None

    def fields(self, lengths: Sequence[int]) -> Iterator[Line]:
        """Yields, for each sample, the fields of its line in the sample files.

        Args:
            lengths: the number of sampled tokens of each sample.

        Raises:
            DataError: the lengths do not match the samples.
        """
        if len(lengths) != len(self.weights) or sum(lengths) != len(self.advantages):
            found = f"{len(self.weights)} samples with {len(self.advantages)} tokens"
            raise DataError(f"{len(lengths)} trained samples with {sum(lengths)} tokens", found, "Report this as a bug.")
        end = 0
        for length, weight, steps in zip(lengths, self.weights.tolist(), self.steps.tolist(), strict=True):
            values = self.advantages[end : end + length]
            end += length
            constant = not length or bool((values == values[0]).all())
            advantage = (
                float(f"{values[0]:.{_DIGITS}g}") if constant and length else [round(float(value), _DIGITS) for value in values]
            )
            yield {"advantage": advantage, "weight": float(f"{weight:.{_DIGITS}g}"), "optimizer_steps": steps}
