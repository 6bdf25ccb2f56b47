"""Whether a replica keeps pace with its peers. Pure; time is an argument, in monotonic seconds.

Invariant: a replica is only ever measured by what the others do, so one alone is never a laggard, nor is one of many that all stand still.
Two things make a laggard of a replica that has samples under way:

- silence: nothing has come from it for longer than SILENCE seconds, ten times the others' median between two chunks of a sample, and
  three times their median until a call's first chunk and for a weight swap;
- slowness: over WINDOW seconds, or ten chunks of a sample, a sample there got less than a fifth of the tokens that the others' got.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

SILENCE = 3.0
GAPS = 10.0
WAITS = 3.0
WINDOW = 10.0
SLOW_SHARE = 0.2
ENOUGH_TOKENS = 64.0
"""What the others would have brought in the window at least: fewer say nothing."""
_NEWEST = 0.1  # weight of the newest value in a mean


@dataclass
class Pace:
    """What one replica brings.

    Attributes:
        slots: samples under way there.
        heard: when something last came, or when it got its first sample.
        gap: mean seconds between two chunks of a sample; None: unknown.
        first: mean seconds until a call's first chunk.
        stall: seconds that its newest weight swap stood still.
        rate: tokens per second and sample in the last whole window; None: unknown.
    """

    slots: int = 0
    heard: float = 0.0
    gap: float | None = None
    first: float = 0.0
    stall: float = 0.0
    rate: float | None = None
    _tokens: int = 0
    _slot_seconds: float = 0.0
    _window: float | None = None
    _counted: float = 0.0

    def change(self, slots: int, now: float) -> None:
        """`slots` samples more (or fewer, when negative) are under way."""
        self._count(now)
        if not self.slots:
            self.heard = now
        self.slots += slots

    def came(self, tokens: int, now: float) -> None:
        """Something came, with so many tokens."""
        self._tokens += tokens
        self.heard = now

    def chunk_after(self, seconds: float) -> None:
        """A chunk of a sample came so long after that sample's chunk before."""
        self.gap = seconds if self.gap is None else self.gap + _NEWEST * (seconds - self.gap)

    def first_after(self, seconds: float) -> None:
        """A call's first chunk came after so long."""
        self.first += (_NEWEST if self.first else 1.0) * (seconds - self.first)

    def forgive(self, now: float) -> None:
        """Nobody listened until now."""
        self.heard, self._window = now, None

    def window(self, seconds: float, now: float) -> float | None:
        """Closes the window once it is so long: the seconds that samples spent there, all together; else None."""
        self._count(now)
        if self._window is None or not self.slots:
            self._window, self._tokens, self._slot_seconds = now, 0, 0.0
        if now - self._window < seconds:
            return None
        spent = self._slot_seconds
        self.rate = self._tokens / spent if spent else None
        self._window, self._tokens, self._slot_seconds = now, 0, 0.0
        return spent

    def _count(self, now: float) -> None:
        self._slot_seconds += self.slots * (now - self._counted)
        self._counted = now


def laggards(paces: Mapping[str, Pace], now: float) -> dict[str, str]:
    """The replicas that lag behind, with the reason. Call it about twice a second."""
    gaps = [pace.gap for pace in paces.values() if pace.gap is not None]
    window = max(WINDOW, GAPS * median(gaps) if gaps else 0.0)
    spent = {name: pace.window(window, now) for name, pace in paces.items()}
    found = {}
    for name, pace in paces.items():
        peers = [peer for other, peer in paces.items() if other != name]
        if pace.slots and (reason := _silent(pace, peers, now) or _slow(pace, spent[name], peers)):
            found[name] = reason
    return found


def _silent(pace: Pace, peers: list[Pace], now: float) -> str:
    gaps = [peer.gap for peer in peers if peer.gap is not None]
    if not gaps:
        return ""
    waits = [median(peer.first for peer in peers), median(peer.stall for peer in peers)]
    limit = max(SILENCE, GAPS * median(gaps), WAITS * max(waits))
    alive = any(not peer.slots or now - peer.heard < limit for peer in peers)
    if now - pace.heard <= limit or not alive:
        return ""
    return f"nothing has come from it for {now - pace.heard:.1f} s, while others bring a chunk every {median(gaps):.2g} s"


def _slow(pace: Pace, spent: float | None, peers: list[Pace]) -> str:
    rates = [peer.rate for peer in peers if peer.rate is not None]
    if not spent or pace.rate is None or not rates:
        return ""
    usual = median(rates)
    if usual * spent < ENOUGH_TOKENS or pace.rate >= SLOW_SHARE * usual:
        return ""
    return f"a sample gets {pace.rate:.3g} tokens/s there, {usual:.3g} elsewhere"
