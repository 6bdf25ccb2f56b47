"""Detects replicas that do not keep pace with their peers. Pure; time is an argument, in monotonic seconds.

Invariant: a replica is compared only with its peers, so a single replica is never a straggler, and neither is one of many that all
stall. A replica with running samples is a straggler when it is

- silent: it has sent nothing for longer than SILENCE_TIMEOUT, than GAP_FACTOR times its peers' median time between two chunks of a
  sample, and than WAIT_FACTOR times their median time to a call's first chunk and their median swap; or
- slow: over WINDOW_SECONDS, or GAP_FACTOR chunks of a sample, its samples got less than SLOW_SHARE of the tokens of its peers' samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

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


def stragglers(paces: Mapping[str, Pace], now: float) -> dict[str, str]:
    """The stragglers, with the reason. Call it about twice a second."""
    gaps = [pace.gap for pace in paces.values() if pace.gap is not None]
    window = max(WINDOW_SECONDS, GAP_FACTOR * median(gaps) if gaps else 0.0)
    spent = {name: pace.window(window, now) for name, pace in paces.items()}
    found = {}
    for name, pace in paces.items():
        peers = [peer for other, peer in paces.items() if other != name]
        if pace.sequences and (reason := _silent(pace, peers, now) or _slow(pace, spent[name], peers)):
            found[name] = reason
    return found


def _silent(pace: Pace, peers: list[Pace], now: float) -> str:
    gaps = [peer.gap for peer in peers if peer.gap is not None]
    if not gaps:
        return ""
    waits = [median(peer.first for peer in peers), median(peer.stall for peer in peers)]
    limit = max(SILENCE_TIMEOUT, GAP_FACTOR * median(gaps), WAIT_FACTOR * max(waits))
    alive = any(not peer.sequences or now - peer.heard < limit for peer in peers)
    if now - pace.heard <= limit or not alive:
        return ""
    return f"it has sent nothing for {now - pace.heard:.1f} s, while its peers send a chunk every {median(gaps):.2g} s"


def _slow(pace: Pace, spent: float | None, peers: list[Pace]) -> str:
    rates = [peer.rate for peer in peers if peer.rate is not None]
    if not spent or pace.rate is None or not rates:
        return ""
    usual = median(rates)
    if usual * spent < ENOUGH_TOKENS or pace.rate >= SLOW_SHARE * usual:
        return ""
    return f"its samples get {pace.rate:.3g} tokens/s, those of its peers {usual:.3g}"
