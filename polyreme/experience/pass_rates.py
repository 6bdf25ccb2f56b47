"""How often each prompt was solved, as the log counts it.

Invariant: the script that takes a scored group into the log counts it, so a group counts exactly once, whatever dies.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Tally:
    """The verdicts on one scored group.

    Attributes:
        prompt: names the prompt, see `PassRates`.
        samples: judged, at least one.
        solved: of these.
    """

    prompt: str
    samples: int
    solved: int


@dataclass(frozen=True)
class PassRate:
    """What is known of a prompt.

    Attributes:
        samples: number of judged samples in all groups.
        solved: of these.
        streak: samples of the newest groups that were all solved; negative: of the newest groups in which none was; 0: the newest group
            had both.
    """

    samples: int = 0
    solved: int = 0
    streak: int = 0

    @classmethod
    def parse(cls, text: str) -> "PassRate":
        """Of the text that the log holds. Raises ValueError or TypeError for another one."""
        return cls(*(int(word) for word in text.split()))

    def __str__(self) -> str:
        return f"{self.samples} {self.solved} {self.streak}"


PassRates = Mapping[str, PassRate]
"""By prompt. A prompt is named by a digest of its content, so a fork with other data knows the prompts that it shares."""
