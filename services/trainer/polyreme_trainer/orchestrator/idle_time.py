"""How long replicas had nothing to do: generation's side of the waiting, as the learner's `wait` is training's. Pure; time is an argument.

A replica is idle while no call of the orchestrator runs on it, for whatever reason: the staleness bound admits no group, a reward
outage pauses admission, an iteration's last answers are long. What it spends on swapping weights under a call is no idleness.
"""


class Idleness:
    """Replica-seconds since the last `take`: how many there were, and how many of them idle.

    Args:
        now: monotonic seconds, here and below.
    """

    def __init__(self, now: float) -> None:
        self._calls: dict[str, int] = {}
        self._since = self._last = now
        self._present = self._idle = 0.0

    def joined(self, replica: str, now: float) -> None:
        """A replica is there, without calls."""
        self._count(now)
        self._calls[replica] = 0

    def left(self, replica: str, now: float) -> None:
        """It is gone; calls that still end on it do not count."""
        self._count(now)
        self._calls.pop(replica, None)

    def began(self, replica: str, now: float) -> None:
        """A call on a replica begins."""
        self._change(replica, 1, now)

    def ended(self, replica: str, now: float) -> None:
        """A call on a replica ends."""
        self._change(replica, -1, now)

    def take(self, now: float) -> float:
        """Seconds since the last call of this in which a replica was idle, as a mean over the replicas that there were."""
        self._count(now)
        fraction = self._idle / self._present if self._present else 0.0
        seconds = fraction * (now - self._since)
        self._since, self._present, self._idle = now, 0.0, 0.0
        return seconds

    def _change(self, replica: str, calls: int, now: float) -> None:
        self._count(now)
        if replica in self._calls:
            self._calls[replica] = max(0, self._calls[replica] + calls)

    def _count(self, now: float) -> None:
        seconds, self._last = now - self._last, now
        self._present += seconds * len(self._calls)
        self._idle += seconds * sum(not calls for calls in self._calls.values())
