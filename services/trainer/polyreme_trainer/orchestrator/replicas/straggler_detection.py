"""Detects replicas that do not keep pace with their peers. Pure; time is an argument, in monotonic seconds.

Invariant: a replica is compared only with its peers, so a single replica is never a straggler, and neither is one of many that
all stall. A replica with running samples is a straggler when it is

- silent: it has sent nothing for longer than SILENCE_TIMEOUT, than GAP_FACTOR times its peers' median time between two chunks of
  a sample, and than WAIT_FACTOR times their median time to a call's first chunk and their median swap; or
- slow: over WINDOW_SECONDS, or GAP_FACTOR chunks of a sample, its samples got less than SLOW_SHARE of the tokens of its peers'.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SILENCE_TIMEOUT = 3.0
GAP_FACTOR = 10.0
WAIT_FACTOR = 3.0
WINDOW_SECONDS = 10.0
SLOW_SHARE = 0.2
ENOUGH_TOKENS = 64.0
"""Tokens that peers would have sampled in the window. With fewer, the window is not judged."""
_EMA_WEIGHT = 0.1  # of the newest value


@dataclass
class Pace:
    """The measured pace of one replica.

    Attributes:
        sequences: number of running samples.
        heard: time of its last message, or of its first sample.
        gap: mean seconds between two chunks of a sample; None: unknown.
        first: mean seconds until a call's first chunk.
        stall: pause of its newest weight swap, in seconds.
        rate: tokens per second and sample in the last complete window; None: unknown.
    """

    sequences: int = 0
    heard: float = 0.0
    gap: float | None = None
    first: float = 0.0
    stall: float = 0.0
    rate: float | None = None
    _tokens: int = 0
    _sequence_seconds: float = 0.0
    _window: float | None = None
    _counted: float = 0.0

    def change(self, sequences: int, now: float) -> None:
        """Records that `sequences` more samples run there (fewer when negative)."""
        self._count(now)
        if not self.sequences:
            self.heard = now
        self.sequences += sequences

    def arrived(self, tokens: int, now: float) -> None:
        """Records the arrival of a message with `tokens` tokens."""
        self._tokens += tokens
        self.heard = now

    def chunk_after(self, seconds: float) -> None:
        """Records the seconds between two chunks of a sample."""
        self.gap = seconds if self.gap is None else self.gap + _EMA_WEIGHT * (seconds - self.gap)

    def first_after(self, seconds: float) -> None:
        """Records the seconds until a call's first chunk."""
        self.first += (_EMA_WEIGHT if self.first else 1.0) * (seconds - self.first)

    def reset(self, now: float) -> None:
        """Discards the silence so far, because this process was not reading messages."""
        self.heard, self._window = now, None

    def window(self, seconds: float, now: float) -> float | None:
        """Closes the window once it is `seconds` long. Returns its sample-seconds, otherwise None."""
        self._count(now)
        if self._window is None or not self.sequences:
            self._window, self._tokens, self._sequence_seconds = now, 0, 0.0
        if now - self._window < seconds:
            return None
        spent = self._sequence_seconds
        self.rate = self._tokens / spent if spent else None
        self._window, self._tokens, self._sequence_seconds = now, 0, 0.0
        return spent

    def _count(self, now: float) -> None:
        self._sequence_seconds += self.sequences * (now - self._counted)
        self._counted = now


class _Numbers:
    """One number of several replicas, sorted once, so that the median of all but one takes no time that grows with the fleet."""

    def __init__(self, numbers: Iterable[float | None]) -> None:
        self._sorted = sorted(number for number in numbers if number is not None)

    def median(self, without: float | None = None) -> float | None:
        """The median, without one replica whose number is `without`. None when nothing is left."""
        left = len(self._sorted) - (without is not None)
        if left < 1:
            return None
        omitted = len(self._sorted) if without is None else bisect_left(self._sorted, without)
        low, high = (self._sorted[place + (place >= omitted)] for place in ((left - 1) // 2, left // 2))
        return (low + high) / 2


@dataclass(frozen=True)
class _Fleet:
    """What all replicas have: their numbers, whether one of them has no sample, and when the last message came."""

    gaps: _Numbers
    firsts: _Numbers
    stalls: _Numbers
    rates: _Numbers
    has_idle: bool
    heard: float


def stragglers(paces: Mapping[str, Pace], now: float) -> dict[str, str]:
    """The stragglers, with the reason. Call it about twice a second."""
    gaps = _Numbers(pace.gap for pace in paces.values())
    gap = gaps.median()
    window = max(WINDOW_SECONDS, 0.0 if gap is None else GAP_FACTOR * gap)
    spent = {name: pace.window(window, now) for name, pace in paces.items()}
    fleet = _Fleet(
        gaps=gaps,
        firsts=_Numbers(pace.first for pace in paces.values()),
        stalls=_Numbers(pace.stall for pace in paces.values()),
        rates=_Numbers(pace.rate for pace in paces.values()),
        has_idle=any(not pace.sequences for pace in paces.values()),
        heard=max((pace.heard for pace in paces.values()), default=now),
    )
    found = {}
    for name, pace in paces.items():
        if pace.sequences and (reason := _silent(pace, fleet, now) or _slow(pace, spent[name], fleet)):
            found[name] = reason
    return found


def _silent(pace: Pace, fleet: _Fleet, now: float) -> str:
    gap = fleet.gaps.median(without=pace.gap)
    first, stall = fleet.firsts.median(without=pace.first), fleet.stalls.median(without=pace.stall)
    if gap is None or first is None or stall is None:
        return ""
    silence, limit = now - pace.heard, max(SILENCE_TIMEOUT, GAP_FACTOR * gap, WAIT_FACTOR * max(first, stall))
    if silence <= limit or not (fleet.has_idle or now - fleet.heard < limit):
        return ""
    return f"it has sent nothing for {silence:.1f} s, while its peers send a chunk every {gap:.2g} s"


def _slow(pace: Pace, spent: float | None, fleet: _Fleet) -> str:
    usual = fleet.rates.median(without=pace.rate)
    if not spent or pace.rate is None or usual is None or usual * spent < ENOUGH_TOKENS or pace.rate >= SLOW_SHARE * usual:
        return ""
    return f"its samples get {pace.rate:.3g} tokens/s, those of its peers {usual:.3g}"
