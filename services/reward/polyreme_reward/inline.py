"""Rules that cannot hang, scored on the event loop. Invariant: the loop gets its turn after every slice of text."""

import asyncio
import math
from collections.abc import Sequence

from polyreme_reward.items import Item, Outcome, RewardError, Status, failed, judge, ok
from polyreme_reward.rules import Rule

_SLICE_CHARS = 4_000_000  # about 10 ms of the slowest linear rule


class InlineReward:
    """A built-in rule that runs in this process because its time is linear in its input."""

    def __init__(self, name: str, weight: float, version: str, description: str, rule: Rule) -> None:
        self.name, self.weight, self.version, self.description = name, weight, version, description
        self._rule = rule

    available = True

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        chars = 0
        for item in items:
            outcomes.append(self._one(item))
            chars += len(item.response) + len(item.label) + len(item.metadata_json) + 100
            if chars > _SLICE_CHARS:
                chars = 0
                await asyncio.sleep(0)
        return outcomes

    def _one(self, item: Item) -> Outcome:
        try:
            value = self._rule(item)
        except RewardError as error:
            return failed(Status.ERROR, str(error))
        return ok(value) if type(value) is float and math.isfinite(value) else judge(value)
