"""Decides which groups and prompts are worth training on. The orchestrator acts on the decisions.

Invariant: a filter considers scores equal exactly where the advantages do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polyreme_trainer.algorithms.groups import Groups


def informative(scores: NDArray[np.float64], group: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [n], whether the scores within the sample's group differ. DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) keeps these.

    Args:
        scores: float64 [n], before shaping.
        group: int64 [n].
    """
    return ~Groups(group).constant(scores)


@dataclass(frozen=True)
class PassRate:
    """How often a prompt was solved.

    Attributes:
        samples: the number of samples scored so far.
        solved: how many of them were solved.
        last_pass: the last pass over the data set that included the prompt.
    """

    samples: int = 0
    solved: int = 0
    last_pass: int = 0

    def add(self, solved: int, samples: int, data_pass: int) -> "PassRate":
        """The pass rate after another group of the prompt."""
        return replace(self, samples=self.samples + samples, solved=self.solved + solved, last_pass=data_pass)


@dataclass(frozen=True)
class SkipRule:
    """When to skip a prompt: all of its samples, or none, were solved, there are enough of them, and they are recent.

    Args:
        samples: the least number of scored samples before a prompt may be skipped.
        never, always: skip prompts that were never, or always, solved.
        passes: passes over the data set after which a skipped prompt is used again, since the policy changes.
    """

    samples: int
    never: bool
    always: bool
    passes: int

    def skips(self, rate: PassRate, data_pass: int) -> bool:
        """Whether pass `data_pass` skips a prompt with this pass rate."""
        if rate.samples < self.samples or data_pass - rate.last_pass > self.passes:
            return False
        return (self.never and rate.solved == 0) or (self.always and rate.solved == rate.samples)


def record(
    rates: Mapping[int, PassRate], prompt: int, scores: NDArray[np.float64], threshold: float, data_pass: int
) -> dict[int, PassRate]:
    """The pass rates after one more group of `prompt`. A sample is solved when its score is above `threshold`."""
    solved = int((scores > threshold).sum())
    return {**rates, prompt: rates.get(prompt, PassRate()).add(solved, len(scores), data_pass)}
