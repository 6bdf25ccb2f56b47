"""Which groups and prompts are worth training on: pure decisions; what acts on them keeps the log and draws the prompts.

Invariant: scores are equal for a filter exactly where they are equal for the advantages.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polyreme_trainer.algorithms.groups import Groups


def informative(scores: NDArray[np.float64], group: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [n], whether the scores of the sample's group differ: DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) keeps these.

    Args:
        scores: float64 [n], as the reward gave them, before shaping.
        group: int64 [n].
    """
    return ~Groups(group).constant(scores)


@dataclass(frozen=True)
class PassRate:
    """How often a prompt was solved.

    Attributes:
        samples: judged so far.
        solved: of these.
        last_pass: over the data set in which it was asked last.
    """

    samples: int = 0
    solved: int = 0
    last_pass: int = 0

    def add(self, solved: int, samples: int, data_pass: int) -> "PassRate":
        """With another group of the prompt."""
        return replace(self, samples=self.samples + samples, solved=self.solved + solved, last_pass=data_pass)


@dataclass(frozen=True)
class SkipRule:
    """When a prompt is not asked: it was always or never solved, over enough samples, and not long ago.

    Args:
        samples: judged before a prompt may be skipped.
        never, always: skip what was never, or always, solved.
        passes: over the data set after which a skipped prompt is asked again, since the policy changes.
    """

    samples: int
    never: bool
    always: bool
    passes: int

    def skips(self, rate: PassRate, data_pass: int) -> bool:
        """Whether a prompt with that record is left out of pass `data_pass`."""
        if rate.samples < self.samples or data_pass - rate.last_pass > self.passes:
            return False
        return (self.never and rate.solved == 0) or (self.always and rate.solved == rate.samples)


def record(
    rates: Mapping[int, PassRate], prompt: int, scores: NDArray[np.float64], threshold: float, data_pass: int
) -> dict[int, PassRate]:
    """The pass rates with the scores of one group of `prompt`; a sample is solved when its score is above `threshold`."""
    solved = int((scores > threshold).sum())
    return {**rates, prompt: rates.get(prompt, PassRate()).add(solved, len(scores), data_pass)}
