"""Measures the idle time of replicas, the counterpart of the learner's wait. Pure; time is an argument.

Invariant: a replica is idle while no call of the orchestrator runs on it, whatever the reason (the staleness bound, a reward
outage, the long answers at an iteration's end). A weight swap during a call is not idle time.
"""


class IdleTime:
    """Replica-seconds since the last `take`, in total and idle.

    Args:
        now: monotonic seconds, here and below.
    """

    def __init__(self, now: float) -> None:
        self._calls: dict[str, int] = {}
        self._without = 0  # replicas without calls
        self._since = self._last = now
        self._present = self._idle = 0.0

    def joined(self, replica: str, now: float) -> None:
        """A replica has joined, without calls."""
        self._count(now)
        if self._calls.get(replica) != 0:
            self._without += 1
        self._calls[replica] = 0

    def left(self, replica: str, now: float) -> None:
        """A replica has left. Calls that end on it later do not count."""
        self._count(now)
        if self._calls.pop(replica, None) == 0:
            self._without -= 1

    def began(self, replica: str, now: float) -> None:
        """A call on a replica has started."""
        self._change(replica, 1, now)

    def ended(self, replica: str, now: float) -> None:
        """A call on a replica has ended."""
        self._change(replica, -1, now)

    def take(self, now: float) -> float:
        """Idle seconds since the previous `take`, as a mean over the replicas that were present."""
        self._count(now)
        fraction = self._idle / self._present if self._present else 0.0
        seconds = fraction * (now - self._since)
        self._since, self._present, self._idle = now, 0.0, 0.0
        return seconds

    def _change(self, replica: str, calls: int, now: float) -> None:
        self._count(now)
        if replica in self._calls:
            before, after = self._calls[replica], max(0, self._calls[replica] + calls)
            self._calls[replica] = after
            self._without += (not after) - (not before)

    def _count(self, now: float) -> None:
        seconds, self._last = now - self._last, now
        self._present += seconds * len(self._calls)
        self._idle += seconds * self._without
