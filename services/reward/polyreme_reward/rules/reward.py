"""A built-in rule as a reward of this process.

Invariant: the event loop never waits for a long text. Short texts are scored on the loop, which is cheaper; long ones in one thread.
"""

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from polyreme_reward.items import Item, Outcome, RewardError, Status, failed, judge, ok
from polyreme_reward.rules import Rule

LOOP_CHARS = 1 << 14
"""Characters of the items that are scored on the event loop in one turn; the slowest rule takes some milliseconds for them."""


class RuleReward:
    """A built-in rule that runs in this process because its time is linear in its input."""

    def __init__(self, name: str, weight: float, version: str, description: str, rule: Rule, correctness: bool = False) -> None:
        self.name, self.weight, self.version, self.description = name, weight, version, description
        self.correctness = correctness
        self._rule = rule
        self._thread = ThreadPoolExecutor(1, f"reward {name}")  # one: the interpreter runs one at a time anyway

    available = True

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome per item, in order."""
        outcomes: list[Outcome] = []
        chars = 0
        for item in items:
            size = len(item.response) + len(item.label) + len(item.metadata_json) + 100
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
        """Ends the thread once it has scored what it was given."""
        await asyncio.to_thread(self._thread.shutdown)

    def _one(self, item: Item) -> Outcome:
        try:
            value = self._rule(item)
        except RewardError as error:
            return failed(Status.ERROR, str(error))
        return ok(value) if type(value) is float and math.isfinite(value) else judge(value)
