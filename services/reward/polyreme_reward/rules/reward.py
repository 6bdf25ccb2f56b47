"""Runs a built-in rule as a reward in this process.

Invariant: a long text never blocks the event loop. Short texts are scored on the loop, which is cheaper, long ones in a thread.
"""

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from polyreme_reward.items import Item, Outcome, RewardError, Status, failed, ok, outcome_of
from polyreme_reward.rules import Rule

LOOP_CHARS = 1 << 14
"""Maximum characters of items scored in one turn of the event loop. The slowest rule needs a few milliseconds for them."""


class RuleReward:
    """A built-in rule with linear time that runs in this process."""

    def __init__(self, name: str, weight: float, version: str, description: str, rule: Rule, correctness: bool = False) -> None:
        self.name, self.weight, self.version, self.description = name, weight, version, description
        self.correctness = correctness
        self._rule = rule
        self._thread = ThreadPoolExecutor(1, f"reward {name}")  # more threads would not help because of the GIL

    available = True
    reads_tokens = False

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Returns one outcome per item, in order."""
        outcomes: list[Outcome] = []
        chars = 0
        for item in items:
            size = len(item.response) + len(item.label or "") + len(item.metadata_json) + 100
            if size > LOOP_CHARS:
                outcomes.append(await asyncio.get_running_loop().run_in_executor(self._thread, self._one, item))
                continue
            outcomes.append(self._one(item))
            chars += size
            if chars > LOOP_CHARS:
                chars = 0
                await asyncio.sleep(0)
        return outcomes

    async def close(self) -> None:
        """Waits for the thread's pending items and ends it."""
        await asyncio.to_thread(self._thread.shutdown)

    def _one(self, item: Item) -> Outcome:
        try:
            value = self._rule(item)
        except RewardError as error:
            return failed(Status.ERROR, str(error))
        return ok(value) if type(value) is float and math.isfinite(value) else outcome_of(value)
