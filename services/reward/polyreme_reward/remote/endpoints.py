"""Load balancing between several URLs.

Invariant: an endpoint that has failed repeatedly gets no requests for a while, then one probe at a time.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polyreme.process.backoff import Backoff

_FAILURES = 3
_BACKOFF = Backoff(first=1.0, longest=30.0)


@dataclass
class RewardEndpoint:
    """One URL and the state of its requests."""

    url: str
    busy: int = 0
    failures: int = 0
    retry_at: float = 0.0
    answered_at: float = float("-inf")


class RewardEndpoints:
    """Balances requests between URLs.

    Args:
        urls: URLs of the same service.
        deadline: maximum seconds of a request.
        clock: returns monotonic time in seconds.
    """

    def __init__(self, urls: Sequence[str], deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._all = [RewardEndpoint(url) for url in urls]
        self._deadline, self._clock = deadline, clock

    @property
    def count(self) -> int:
        """The number of URLs, including dead ones."""
        return len(self._all)

    def take(self) -> RewardEndpoint | None:
        """Takes a dead endpoint that is due for a probe, else the least busy live one. None when all are dead and none is due."""
        now = self._clock()
        due = [e for e in self._all if e.failures >= _FAILURES and e.retry_at <= now]
        live = [e for e in self._all if e.failures < _FAILURES]
        if due:
            chosen = due[0]
            chosen.retry_at = now + _pause(chosen.failures)  # one probe at a time
        elif live:
            chosen = min(live, key=lambda e: (e.failures, e.busy))
        else:
            return None
        chosen.busy += 1
        return chosen

    def give_back(self, endpoint: RewardEndpoint, alive: bool | None) -> None:
        """Ends a request. `alive`: True: the server answered; False: it did not; None: the item may have caused the failure."""
        endpoint.busy -= 1
        if alive:
            endpoint.failures, endpoint.answered_at = 0, self._clock()
        elif alive is False:
            self._failed(endpoint)

    def record_missed_deadline(self, endpoint: RewardEndpoint) -> None:
        """Records that a request missed its deadline.

        The item may be the cause. But if the endpoint has answered no request for a whole deadline, its machine may be
        unreachable, and the miss counts as a failure when there are other endpoints.
        """
        others = any(other.failures < _FAILURES for other in self._all if other is not endpoint)
        if others and self._clock() - endpoint.answered_at >= self._deadline:
            self._failed(endpoint)

    def next_probe(self) -> float:
        """Seconds until the next probe of a dead endpoint."""
        return max(0.0, min(e.retry_at for e in self._all) - self._clock())

    def _failed(self, endpoint: RewardEndpoint) -> None:
        endpoint.failures += 1
        endpoint.retry_at = self._clock() + _pause(endpoint.failures)


def _pause(failures: int) -> float:
    return _BACKOFF.delay(failures - _FAILURES + 1)
