"""How busy a worker was in the last minute, from its counter of busy seconds."""

from collections import deque

WINDOW_SECONDS = 60.0


class BusyTime:
    """The newest values of the workers' counters."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, float]]] = {}

    def fraction(self, worker: str, now: float, busy_seconds: float) -> float | None:
        """The busy fraction of the last WINDOW_SECONDS; None at the first call. `now`: seconds of a monotonic clock."""
        seen = self._seen.setdefault(worker, deque())
        seen.append((now, busy_seconds))
        while len(seen) > 2 and now - seen[1][0] >= WINDOW_SECONDS:
            seen.popleft()
        began, before = seen[0]
        passed = now - began
        return None if passed <= 0 else min(1.0, max(0.0, (busy_seconds - before) / passed))
