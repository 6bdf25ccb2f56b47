"""Decides whether a replica receives a version from the trainer or from another replica. Pure; time is an argument.

Invariant:
- While a replica that may be asked has the content, or receives it, the trainer sends it to no more than `roots` replicas.
- No replica waits for itself: a source does not depend on the replica that it is assigned to.
- A replica that failed to fetch from two others receives from the trainer, and one that failed two is not asked, for a while.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from polyreme.weights.wire import MAX_FETCHES

MAX_UNFINISHED = 32  # replicas in a row that each still receive: every one adds the time of the largest tensor
FAILURES = 2
FORGET_SECONDS = 300.0


class Content(NamedTuple):
    """What is sent: a whole version, or with `base` the delta from that version."""

    version: int
    base: int | None = None


@dataclass
class _Receipt:
    """A replica's newest transfer. `source`: None is the trainer; `hops`: transfers from the trainer to here."""

    content: Content
    source: str | None
    hops: int
    complete: bool = False


class RelayPlan:
    """Who receives what from whom.

    Args:
        roots: replicas that receive the same content from the trainer, where others can fetch it.
        max_fetches: replicas that fetch from one replica at once.
    """

    def __init__(self, roots: int, max_fetches: int = MAX_FETCHES) -> None:
        self._roots, self._max_fetches = roots, max_fetches
        self._receipts: dict[str, _Receipt] = {}
        self._failures: dict[tuple[str, str], float] = {}  # (replica, source): when it is forgotten

    def assign(self, replica: str, content: Content, now: float, full: Collection[str] = ()) -> str | None:
        """The replica that `replica` fetches the content from, none of `full`; None: the trainer sends it.

        The replica with the fewest others that fetch from it comes first. The result is a chain, which uses each link once, and a
        tree beyond MAX_UNFINISHED.
        """
        self._failures = {pair: until for pair, until in self._failures.items() if until > now}
        others = {name: receipt for name, receipt in self._receipts.items() if name != replica}
        roots = sum(receipt.content == content and receipt.source is None for receipt in others.values())
        children = Counter(receipt.source for receipt in others.values() if not receipt.complete)
        failed = Counter(source for _, source in self._failures)

        def order(name: str) -> tuple[int, bool, int, str]:
            return children[name], not others[name].complete, others[name].hops, name

        sources = (
            name
            for name in sorted((name for name, receipt in others.items() if _has(receipt, content)), key=order)
            if children[name] < self._max_fetches and failed[name] < FAILURES and (replica, name) not in self._failures
            if name not in full and self._may_wait(replica, name)
        )
        source = None
        if sum(child == replica for child, _ in self._failures) < FAILURES:
            source = next(sources, None)
        if source is not None and roots < self._roots and not others[source].complete:
            source = None
        self._receipts[replica] = _Receipt(content, source, self.hops(source) + 1)
        return source

    def hops(self, replica: str | None) -> int:
        """Transfers from the trainer to the replica; of the trainer (None) 0."""
        return self._receipts[replica].hops if replica is not None else 0

    def completed(self, replica: str) -> None:
        """The replica has the content that was assigned last."""
        if receipt := self._receipts.get(replica):
            receipt.complete = True

    def failed(self, replica: str, source: str, now: float) -> None:
        """The replica could not fetch from the source."""
        self._failures[replica, source] = now + FORGET_SECONDS

    def missing(self, source: str, content: Content) -> None:
        """The source was asked for the content and does not have it. What it received since is not in question."""
        receipt = self._receipts.get(source)
        if receipt and _has(receipt, content):
            self.forget(source)

    def forget(self, replica: str) -> None:
        """The replica does not have, or no longer receives, what was assigned to it."""
        self._receipts.pop(replica, None)

    def drop(self, replica: str) -> None:
        """The replica has left."""
        self.forget(replica)
        self._failures = {pair: until for pair, until in self._failures.items() if replica not in pair}

    def _may_wait(self, replica: str, source: str) -> bool:
        """Whether the source does not depend on the replica, and on no more than MAX_UNFINISHED transfers."""
        at: str | None = source
        for _ in range(MAX_UNFINISHED + 1):
            receipt = self._receipts.get(at) if at is not None else None
            if at == replica:
                return False
            if receipt is None or receipt.complete:
                return True
            at = receipt.source
        return False


def _has(receipt: _Receipt, content: Content) -> bool:
    """Whether a replica with this receipt has the content, or receives it."""
    has_version = receipt.complete and receipt.content.version == content.version
    return receipt.content == content or (has_version and content.base is None)
