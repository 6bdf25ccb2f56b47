"""What the training service's losses read: inputs and options, by API name. Their formulas are in `algorithms.service_losses`.

Invariant: imports no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class LossSpec:
    """What a loss reads.

    Attributes:
        inputs: the names of its inputs, float32 [n] each for a datum of n tokens.
        options: its options with their defaults.
        optional: inputs that are 1 where they are missing. The mask of a loss with advantages is 1 where these are not 0.
        positive: options that must be above 0; the others may be any finite number.
        together: the number of consecutive datums that belong together.
        output: what the model gives for each token: the log-probability of its target, or a critic's value, which has no target.
    """

    inputs: tuple[str, ...]
    options: Mapping[str, float] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    positive: frozenset[str] = frozenset()
    together: int = 1
    output: Literal["logprobs", "values"] = "logprobs"


_BOUNDS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAPO = {"tau_positive": 1.0, "tau_negative": 1.05}
_SAMPLED = ("logprobs", "advantages")
_MASKED, _MASK = (*_SAMPLED, "mask"), frozenset({"mask"})
_REFERENCE, _WEIGHTS = ("weights", "reference_logprobs"), frozenset({"weights"})
SPECS: Mapping[str, LossSpec] = {
    "cross_entropy": LossSpec(("weights",), optional=_WEIGHTS),
    "importance_sampling": LossSpec(_SAMPLED),
    "ppo": LossSpec(_SAMPLED, _BOUNDS),
    "cispo": LossSpec(_SAMPLED, _BOUNDS),
    "dro": LossSpec(_SAMPLED, {"beta": 0.05}),
    "gspo": LossSpec(_MASKED, {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}, _MASK),
    "gmpo": LossSpec(_MASKED, {"low": 0.4, "high": 0.4}, _MASK),
    "dual_clip": LossSpec(_SAMPLED, {**_BOUNDS, "dual": 3.0}),
    "sapo": LossSpec(_SAMPLED, _SAPO, positive=frozenset(_SAPO)),
    "dppo_tv": LossSpec(_SAMPLED, {"low": 0.2, "high": 0.2, "cap": 20.0}),
    "reinforce": LossSpec(("advantages",)),
    "dpo": LossSpec(_REFERENCE, {"beta": 0.1, "label_smoothing": 0.0}, _WEIGHTS, together=2),
    "ipo": LossSpec(_REFERENCE, {"beta": 0.1}, _WEIGHTS, frozenset({"beta"}), together=2),
    "simpo": LossSpec(("weights",), {"beta": 2.0, "gamma": 1.0}, _WEIGHTS, together=2),
    "orpo": LossSpec(("weights",), {"beta": 0.1}, _WEIGHTS, together=2),
    "value": LossSpec(("returns", "values", "mask"), {"value_clip": 0.5}, _MASK, output="values"),
}
