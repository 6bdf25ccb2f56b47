"""Decides which groups and prompts are worth training on. The orchestrator acts on the decisions.

Invariant: a filter considers scores equal exactly where the advantages do.
"""

import numpy as np
from numpy.typing import NDArray

from polyreme.config.recipes.recipe import SkipPrompts
from polyreme.experience.pass_rates import PassRate
from polyreme_trainer.algorithms.groups import Groups


def informative(scores: NDArray[np.float64], group: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [n], whether the group's scores differ. DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) keeps these.

    Args:
        scores: float64 [n], before shaping.
        group: int64 [n].
    """
    return ~Groups(group).constant(scores)


def reason_to_skip(rule: SkipPrompts, rate: PassRate, draw: float) -> str | None:
    """The reason to skip a prompt with that pass rate; None when it is sampled.

    Args:
        draw: uniform in [0, 1). A draw below `rule.retry` samples the prompt in any case.
    """
    if draw < rule.retry:
        return None
    if rule.always and rate.streak >= rule.min_samples:
        return "always solved"
    if rule.never and -rate.streak >= rule.min_samples:
        return "never solved"
    return None
