"""What the losses of the training service read: their inputs and options, by the API's name. Their formulas are in `algorithms.service_losses`.

Invariant: imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LossSpec:
    """What a loss reads.

    Attributes:
        inputs: the names of its inputs, float32 [n] each for a datum of n tokens.
        options: its options with their defaults.
        optional: inputs that are 1 where they are missing.
    """

    inputs: tuple[str, ...]
    options: Mapping[str, float] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()


_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED = ("logprobs", "advantages")
SPECS: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec(("weights",), optional=frozenset({"weights"})),
    "importance_sampling": LossSpec(_SAMPLED),
    "ppo": LossSpec(_SAMPLED, _BOUNDS),
    "cispo": LossSpec(_SAMPLED, _BOUNDS),
    "dro": LossSpec(_SAMPLED, {"beta": 0.05}),
}
