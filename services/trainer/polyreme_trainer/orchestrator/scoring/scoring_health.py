"""Decides whether scoring as a whole is down, or only some groups fail.

Invariant: pure; time is an argument. A success ends an outage.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class ScoringHealth:
    """Whether scoring as a whole is down. Pure; time is an argument.

    It is down when no server answers, or when two groups got only failures. A single such group may be a bad row.

    Attributes:
        outage_timeout: seconds that an outage may last, with admission paused, before failures count.
        proven: whether anything was ever scored in this run. Until then, an error of the rewards themselves is not an outage.
        down_since: time of the first failure since the last success.
    """

    outage_timeout: float
    proven: bool = True
    down_since: float | None = None
    announced: bool = False
    _suspects: set[Hashable] = field(default_factory=set)

    def succeeded(self) -> None:
        self.proven, self.down_since, self.announced = True, None, False
        self._suspects.clear()

    def failed(self, now: float, *who: Hashable) -> None:
        """Records that the groups `who` got only failures; without `who`, that no server answered."""
        if self.down_since is None:
            self.down_since = now
        self._suspects |= set(who or ("the servers", "themselves"))

    def waits(self, now: float) -> bool:
        return self.down_since is not None and len(self._suspects) > 1 and now - self.down_since < self.outage_timeout
