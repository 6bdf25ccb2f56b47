"""The choice between several URLs. Invariant: an endpoint that failed repeatedly gets no requests for a while, then a single probe."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_FAILURES = 3
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


@dataclass
class RewardEndpoint:
    """One URL and the state of its requests."""

    url: str
    busy: int = 0
    failures: int = 0
    retry_at: float = 0.0
    answered_at: float = float("-inf")


class RewardEndpoints:
    """Shares the load between URLs.

    Args:
        deadline: seconds for a request.
        clock: returns monotonic seconds.
    """

    def __init__(self, urls: Sequence[str], deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._all = [RewardEndpoint(url) for url in urls]
        self._deadline, self._clock = deadline, clock

    @property
    def count(self) -> int:
        """The number of URLs, dead ones included."""
        return len(self._all)

    def take(self) -> RewardEndpoint | None:
        """The least busy live endpoint, or a dead one that is due for a probe; None when all are dead and none is due."""
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
        """Ends a request. `alive`: the server answered; False: no server is there; None: the item may be the cause of the failure."""
        endpoint.busy -= 1
        if alive:
            endpoint.failures, endpoint.answered_at = 0, self._clock()
        elif alive is False:
            self._failed(endpoint)

    def let_pass(self, endpoint: RewardEndpoint) -> None:
        """Records that a request missed its deadline. The item may be the cause, unless the endpoint has answered no request for as long:
        then its machine may be gone, and other endpoints are preferred."""
        others = any(other.failures < _FAILURES for other in self._all if other is not endpoint)
        if others and self._clock() - endpoint.answered_at >= self._deadline:
            self._failed(endpoint)

    def next_probe(self) -> float:
        """Seconds until a dead endpoint is tried again."""
        return max(0.0, min(e.retry_at for e in self._all) - self._clock())

    def _failed(self, endpoint: RewardEndpoint) -> None:
        endpoint.failures += 1
        endpoint.retry_at = self._clock() + _pause(endpoint.failures)


def _pause(failures: int) -> float:
    return float(min(_FIRST_PAUSE * 2 ** min(max(failures - _FAILURES, 0), 10), _LONGEST_PAUSE))
