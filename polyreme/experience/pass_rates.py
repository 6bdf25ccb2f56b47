"""The log's counts of how often each prompt was solved.

Invariant: the script that adds a scored group to the log also counts it, so a group counts exactly once, whichever process dies.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Tally:
    """The verdicts on one scored group.

    Attributes:
        prompt: name of the prompt, see `PassRates`.
        samples: number of judged samples, at least one.
        solved: number of solved ones among them.
    """

    prompt: str
    samples: int
    solved: int


@dataclass(frozen=True)
class PassRate:
    """The counts of a prompt.

    Attributes:
        samples: number of judged samples in all groups.
        solved: number of solved ones among them.
        streak: samples in the newest groups in which all were solved; negative: in which none was; 0: the newest group had both.
    """

    samples: int = 0
    solved: int = 0
    streak: int = 0

    @classmethod
    def parse(cls, text: str) -> "PassRate":
        """Parses the log's text. Raises ValueError or TypeError for any other text."""
        return cls(*(int(word) for word in text.split()))

    def __str__(self) -> str:
        return f"{self.samples} {self.solved} {self.streak}"


PassRates = Mapping[str, PassRate]
"""Pass rates by prompt. The name of a prompt is a digest of its content, so a fork with other data recognises shared prompts."""
