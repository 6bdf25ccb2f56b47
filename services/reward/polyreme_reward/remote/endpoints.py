"""Which of several URLs is asked next. Invariant: an endpoint that failed repeatedly is left alone, then probed by one request."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_FAILURES = 3
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


@dataclass
class Endpoint:
    """One URL and how it has been doing."""

    url: str
    busy: int = 0
    failures: int = 0
    retry_at: float = 0.0
    answered_at: float = float("-inf")


class Endpoints:
    """Shares the load between URLs.

    Args:
        deadline: seconds for a request.
        clock: gives monotonic seconds.
    """

    def __init__(self, urls: Sequence[str], deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._all = [Endpoint(url) for url in urls]
        self._deadline, self._clock = deadline, clock

    @property
    def count(self) -> int:
        """How many there are, dead ones too."""
        return len(self._all)

    def take(self) -> Endpoint | None:
        """The least busy live endpoint, or a dead one whose time for a probe has come; None when all are being left alone."""
        now = self._clock()
        due = [e for e in self._all if e.failures >= _FAILURES and e.retry_at <= now]
        live = [e for e in self._all if e.failures < _FAILURES]
        if due:
            chosen = due[0]
            chosen.retry_at = now + _pause(chosen.failures)  # nobody else probes meanwhile
        elif live:
            chosen = min(live, key=lambda e: (e.failures, e.busy))
        else:
            return None
        chosen.busy += 1
        return chosen

    def give_back(self, endpoint: Endpoint, alive: bool | None) -> None:
        """Ends a request. `alive`: it answered; False: nobody is there; None: what failed may have been the item's doing."""
        endpoint.busy -= 1
        if alive:
            endpoint.failures, endpoint.answered_at = 0, self._clock()
        elif alive is False:
            self._failed(endpoint)

    def let_pass(self, endpoint: Endpoint) -> None:
        """A deadline has passed while it was asked. That may have been the item's doing, unless it has answered nobody for as long: then
        its machine may be gone without a word, and others are asked first, where there are any."""
        others = any(other.failures < _FAILURES for other in self._all if other is not endpoint)
        if others and self._clock() - endpoint.answered_at >= self._deadline:
            self._failed(endpoint)

    def next_probe(self) -> float:
        """Seconds until a dead endpoint is tried again."""
        return max(0.0, min(e.retry_at for e in self._all) - self._clock())

    def _failed(self, endpoint: Endpoint) -> None:
        endpoint.failures += 1
        endpoint.retry_at = self._clock() + _pause(endpoint.failures)


def _pause(failures: int) -> float:
    return float(min(_FIRST_PAUSE * 2 ** min(max(failures - _FAILURES, 0), 10), _LONGEST_PAUSE))
