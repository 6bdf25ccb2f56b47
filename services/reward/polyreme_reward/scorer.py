"""Computes the scores of items, for every protocol.

Invariant: a score exists only when every reward has returned a finite value. The items of one key are not scored concurrently. At
most `limit` items are accepted and not yet answered.
"""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from polyreme_reward.items import Item, Outcome, Reward, RewardError, Status, failed
from polyreme_reward.metrics import RewardMetrics

logger = logging.getLogger(__name__)

BATCH_LIMIT = 4096


class Part(NamedTuple):
    """The contribution of one reward to a score: its raw and its weighted value.

    An additional number that a reward reports is a sub-part REWARD/NAME with the same weight. The score is the sum of `weighted`
    over the parts that are not sub-parts.
    """

    name: str
    raw: float
    weighted: float
    version: str


class Scored(NamedTuple):
    """The answer for one item. `score` is valid only with Status.OK. `parts` has the rewards that succeeded.

    `token_rewards` is the weighted sum over the rewards with one number per token, or empty. It is a part of the score; the rest
    of the score belongs to the last token.
    """

    status: Status
    score: float
    parts: tuple[Part, ...]
    message: str = ""
    token_rewards: tuple[float, ...] = ()


class BadBatch(ValueError):
    """An invalid batch, for which a retry cannot help."""


class RequestRejected(RuntimeError):
    """The queue is full, or the service drains (`draining`). Retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float, draining: bool = False) -> None:
        super().__init__(message)
        self.retry_after, self.draining = retry_after, draining


class Scorer:
    """Combines the rewards of a run.

    Args:
        rewards: every item is scored by all of them, or by those that its row names. A score is the sum of their weighted values.
        limit: maximum number of accepted items without an answer. Calls beyond it are refused.
        metrics: counts all outcomes.
        choose_by: column with the name of a row's reward, or a list of names. None: all rewards score all rows.
        choices: name of a reward by value of that column. A value that is not listed is a name itself.
        remembered, remembered_tokens: the answers that are kept for retries, and their token rewards, of 32 bytes each.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        limit: int,
        metrics: RewardMetrics,
        choose_by: str | None = None,
        choices: Mapping[str, str] | None = None,
        remembered: int = 1 << 16,
        remembered_tokens: int = 1 << 22,
    ) -> None:
        self._remembered, self._remembered_tokens = remembered, remembered_tokens
        self.rewards = tuple(rewards)
        self._choose_by, self._choices = choose_by, choices or {}
        self.limit = limit
        self._metrics = metrics
        self._inside = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._seconds_per_item = 0.0
        self._known: OrderedDict[str, Scored] = OrderedDict()
        self._known_tokens = 0
        self._running: dict[str, asyncio.Future[Scored]] = {}

    @property
    def inside(self) -> int:
        """Number of items that are being scored."""
        return self._inside

    async def score(self, items: Sequence[Item]) -> list[Scored]:
        """Scores items. The answers have the order of the items.

        After a cancelled call its items continue until their deadline, so that a retry finds answers for items with a key.

        Raises:
            BadBatch: the batch is empty, or larger than BATCH_LIMIT or `limit`.
            RequestRejected: the queue is full, or the service drains.
        """
        if not 0 < len(items) <= min(BATCH_LIMIT, self.limit):
            raise BadBatch(f"expected a batch of 1 to {min(BATCH_LIMIT, self.limit)} items; found {len(items)}")
        if self._draining:
            raise RequestRejected("the reward service is shutting down", 1.0, draining=True)
        answers: list[Scored | None] = [None] * len(items)
        awaited: list[tuple[int, asyncio.Future[Scored]]] = []
        fresh: list[int] = []
        keys: set[str] = set()
        repeats: list[int] = []
        for position, item in enumerate(items):
            key = item.key
            if key and (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                answers[position] = known
            elif key and (running := self._running.get(key)) is not None:
                awaited.append((position, running))
            elif key in keys:
                repeats.append(position)
            else:
                fresh.append(position)
                if key:
                    keys.add(key)
        if fresh:
            batch = [items[position] for position in fresh] if len(fresh) < len(items) else items
            for position, scored in zip(fresh, await self._admit(batch), strict=True):
                answers[position] = scored
        for position, running in awaited:
            answers[position] = await asyncio.shield(running)
        if repeats:
            first = {items[position].key: answers[position] for position in fresh}
            for position in repeats:
                answers[position] = first[items[position].key]
        return [answer for answer in answers if answer is not None]

    async def drain(self, grace: float) -> int:
        """Refuses new calls and waits up to `grace` seconds for open ones. Returns the number of abandoned items."""
        self._draining = True
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("%d items are abandoned, since they were not scored within %.0f s", self._inside, grace)
        return self._inside

    async def _admit(self, batch: Sequence[Item]) -> list[Scored]:
        if self._inside + len(batch) > self.limit:
            self._metrics.refused.inc(len(batch))
            wait = min(max(self._inside * self._seconds_per_item, 0.1), 30.0)
            raise RequestRejected(f"the queue is full: {self._inside} items are being scored, the limit is {self.limit}", wait)
        self._inside += len(batch)
        self._idle.clear()
        self._metrics.inside.set(self._inside)
        loop = asyncio.get_running_loop()
        for item in batch:
            if item.key:
                self._running[item.key] = loop.create_future()
        return await asyncio.shield(loop.create_task(self._run(batch)))

    async def _run(self, batch: Sequence[Item]) -> list[Scored]:
        begin = time.perf_counter()
        try:
            results = await self._compose(batch)
            for item, scored in zip(batch, results, strict=True):
                if item.key:
                    self._running[item.key].set_result(scored)
                    if scored.status is Status.OK:
                        self._known[item.key] = scored
                        self._known_tokens += len(scored.token_rewards)
            while len(self._known) > self._remembered or self._known_tokens > self._remembered_tokens:
                self._known_tokens -= len(self._known.popitem(last=False)[1].token_rewards)
            return results
        finally:
            for item in batch:
                if item.key and not (future := self._running.pop(item.key)).done():
                    future.cancel()
            self._inside -= len(batch)
            if not self._inside:
                self._idle.set()
            seconds = time.perf_counter() - begin
            self._seconds_per_item += 0.1 * (seconds / len(batch) - self._seconds_per_item)
            self._metrics.inside.set(self._inside)
            self._metrics.batch_seconds.observe(seconds)

    async def _compose(self, batch: Sequence[Item]) -> list[Scored]:
        if self._choose_by is None:
            columns = await asyncio.gather(*(self._ask(reward, batch) for reward in self.rewards))
            return [_sum(self.rewards, row) for row in zip(*columns, strict=True)]
        return await self._compose_chosen(batch, self._choose_by)

    async def _compose_chosen(self, batch: Sequence[Item], column: str) -> list[Scored]:
        """Scores each item with the rewards that its row names. Calls each reward once, with all its items."""
        rows: list[list[tuple[Reward, Outcome]]] = [[] for _ in batch]
        asked: dict[str, list[int]] = {reward.name: [] for reward in self.rewards}
        errors: dict[int, Scored] = {}
        for position, item in enumerate(batch):
            try:
                for name in _chosen(item, column, asked, self._choices):
                    asked[name].append(position)
            except RewardError as error:
                outcome = failed(Status.ERROR, str(error))
                errors[position] = Scored(outcome.status, 0.0, (), outcome.message)

        async def ask(reward: Reward) -> None:
            if places := asked[reward.name]:
                for position, outcome in zip(places, await self._ask(reward, [batch[p] for p in places]), strict=True):
                    rows[position].append((reward, outcome))

        await asyncio.gather(*map(ask, self.rewards))
        return [
            errors.get(position) or _sum([reward for reward, _ in row], [outcome for _, outcome in row])
            for position, row in enumerate(rows)
        ]

    async def _ask(self, reward: Reward, batch: Sequence[Item]) -> list[Outcome]:
        try:
            outcomes = await reward.score(batch)
            if len(outcomes) != len(batch):
                raise AssertionError(f"the reward {reward.name} returned {len(outcomes)} outcomes for {len(batch)} items")
        except Exception as error:  # a bug in this package: the batch's other rewards and its callers must not suffer
            logger.exception("the reward %s violated its contract", reward.name)
            outcomes = [failed(Status.ERROR, f"the reward itself failed: {type(error).__name__}: {error}")] * len(batch)
        self._metrics.count(reward.name, outcomes)
        return outcomes


def _sum(rewards: Sequence[Reward], row: Sequence[Outcome]) -> Scored:
    """The answer for one item, from the outcomes of its rewards."""
    parts: list[Part] = []
    failure: Outcome | None = None
    total = 0.0
    per_token: list[list[float]] = []
    for reward, outcome in zip(rewards, row, strict=True):
        if outcome.status is Status.OK:
            weighted = reward.weight * outcome.value
            total += weighted
            if outcome.token_rewards:
                per_token.append([reward.weight * value for value in outcome.token_rewards])
            parts.append(Part(reward.name, outcome.value, weighted, reward.version))
            for name, value in outcome.extras.items():
                parts.append(Part(f"{reward.name}/{name}", value, reward.weight * value, reward.version))
        elif failure is None:
            failure = failed(outcome.status, f"{reward.name}: {outcome.message}")
    tokens = tuple(map(math.fsum, zip(*per_token, strict=True)))
    finite = [part for part in parts if math.isfinite(part.weighted)]
    if failure is None and not (parts == finite and math.isfinite(total) and all(map(math.isfinite, tokens))):
        failure = failed(Status.INVALID, f"expected a finite sum of weighted rewards; found {total}")
    if failure is not None:
        return Scored(failure.status, 0.0, tuple(finite), failure.message)
    return Scored(Status.OK, total, tuple(parts), token_rewards=tokens)


def _chosen(item: Item, column: str, known: Collection[str], choices: Mapping[str, str]) -> list[str]:
    """The names of the rewards that the item's row names. Raises RewardError when it names none or an unknown one."""
    named = item.metadata.get(column)
    names = [named] if isinstance(named, str) else named
    if isinstance(names, list):
        names = [choices.get(name, name) if isinstance(name, str) else name for name in names]
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name in known for name in names):
        raise RewardError(f"expected the column {column!r} to name rewards among {sorted(known)}; found {str(named)[:200]}")
    return list(dict.fromkeys(names))
