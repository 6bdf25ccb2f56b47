"""What the experience log holds, for every process.

Invariant: nothing here changes the log, or needs a term.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from polyreme.errors import StoreError
from polyreme.experience.audit import Audit, LogSnapshot
from polyreme.experience.metric_records import Line
from polyreme.experience.pass_rates import PassRate
from polyreme.experience.run import Run
from polyreme.experience.shard import ONLY, Shard

COMMITS_BOUND = 4_000  # a new orchestrator reads the newest commit of each replica here
_READ_AT_ONCE = 64  # payloads per command; a long reply would delay every other client


@dataclass(frozen=True)
class Admission:
    """The right to generate group `index`. Its append must name the same attempt."""

    index: int
    attempt: int
    version: int


@dataclass(frozen=True)
class Plan:
    """The groups that iteration `iteration` trains on, in order."""

    iteration: int
    indices: tuple[int, ...]

    @classmethod
    def parse(cls, iteration: int, text: bytes) -> "Plan":
        return cls(iteration, tuple(int(word) for word in text.split()))


@dataclass(frozen=True)
class Unplanned:
    """The groups that no plan has taken, at one instant.

    Attributes:
        version: the newest trained one; -1 before the learner has begun.
        planned: the newest iteration that has a plan.
        in_flight: (admitted version, index), oldest version first, then by index.
        appended: the oldest version of each appended group.
        paused: the indices of groups in flight that are paused, if several orchestrators share the groups.
    """

    version: int
    planned: int
    in_flight: tuple[tuple[int, int], ...]
    appended: tuple[int, ...]
    paused: frozenset[int] = frozenset()


class LogReader:
    """The log of one run, to read."""

    def __init__(self, run: Run) -> None:
        self.run = run

    async def version(self) -> int:
        """The newest trained version; -1 before the learner has begun."""
        return int(await self.run.redis.hget(self.run.key("meta"), "version") or -1)

    async def evaluated(self) -> int:
        """The newest version whose evaluation has ended or was skipped; -1 at first."""
        return int(await self.run.redis.hget(self.run.key("meta"), "evaluated") or -1)

    async def planned(self) -> int:
        """The newest iteration that has a plan; in a new log the version it began at."""
        base, count = await asyncio.gather(
            self.run.redis.hget(self.run.key("meta"), "base"), self.run.redis.hlen(self.run.key("plans"))
        )
        return int(base or 0) + int(count)

    async def in_flight(self, shard: Shard = ONLY) -> list[Admission]:
        """The groups of an orchestrator that are admitted and not appended, oldest version first.

        The orchestrator compares them with its own work. After a takeover it continues each under the same attempt, and an
        expired attempt appears here with the next number.
        """
        members = [int(m) for m in await self.run.redis.zrange(self.run.key("in_flight"), 0, -1)]
        return await self.admitted([index for index in members if shard.owns(index)])

    async def admitted(self, indices: Sequence[int]) -> list[Admission]:
        """Those of these groups that are in flight, in the same order."""
        rows = await self.run.redis.hmget(self.run.key("ledger"), list(indices)) if indices else []
        words = [(index, row.split()) for index, row in zip(indices, rows, strict=True) if row is not None]
        return [Admission(index, int(row[1]), int(row[2])) for index, row in words if row[0] == b"admitted"]

    async def next_index(self) -> int:
        """The index of the group that is admitted next."""
        first, count = await asyncio.gather(
            self.run.redis.hget(self.run.key("meta"), "first_group"), self.run.redis.hlen(self.run.key("ledger"))
        )
        return int(first or 0) + int(count)

    async def reports(self) -> dict[int, tuple[int, Line]]:
        """By the number of an orchestrator that does not lead: the counter of its term, and what it has done in it."""
        found = {
            number: json.loads(text) for number, text in (await self.run.redis.hgetall(self.run.key("orchestrators"))).items()
        }
        return {int(number): (line["term"], line["done"]) for number, line in found.items()}

    async def unplanned(self) -> Unplanned:
        """The groups that no plan has taken."""
        version, planned, in_flight, appended, paused = await self.run.scripts.call("unplanned")
        return Unplanned(
            version,
            planned,
            tuple((int(score), int(member)) for member, score in zip(in_flight[::2], in_flight[1::2], strict=True)),
            tuple(int(score) for score in appended[1::2]),
            frozenset(paused),
        )

    async def partial_rollouts(self, admissions: Sequence[Admission]) -> dict[int, list[bytes]]:
        """The saved parts of these attempts, by index, for those that have any. Only the orchestrator calls it."""
        redis, key = self.run.redis, self.run.key("drafts")
        heads = await redis.hmget(key, [admission.index for admission in admissions]) if admissions else []
        found: dict[int, list[bytes]] = {}
        for admission, head in zip(admissions, heads, strict=True):
            attempt, count = (int(word) for word in (head or b"0 0").split())
            if count and attempt == admission.attempt:
                parts = await redis.hmget(key, [f"{admission.index}:{number}" for number in range(count)])
                if None not in parts:  # the attempt ended between the two commands
                    found[admission.index] = parts
        return found

    async def pass_rate(self, prompt: str) -> PassRate:
        """The pass rate of a prompt."""
        text = await self.run.redis.hget(self._pass_rates, prompt)
        return PassRate() if text is None else PassRate.parse(text.decode())

    async def pass_rates(self) -> dict[str, PassRate]:
        """The pass rates of all judged prompts."""
        found = self.run.redis.hscan_iter(self._pass_rates, count=1000)
        return {prompt.decode(): PassRate.parse(text.decode()) async for prompt, text in found}

    async def find_plan(self, iteration: int) -> Plan | None:
        """The plan of `iteration` if there is one."""
        text = await self.run.redis.hget(self.run.key("plans"), str(iteration))
        return None if text is None else Plan.parse(iteration, text)

    async def read(self, plan: Plan) -> list[bytes]:
        """The payloads of a plan's groups, in its order.

        Raises:
            StoreError: one is missing, because it was released.
        """
        payloads: list[bytes | None] = []
        for start in range(0, len(plan.indices), _READ_AT_ONCE):
            payloads += await self.run.redis.hmget(self.run.key("payloads"), list(plan.indices[start : start + _READ_AT_ONCE]))
        found = [payload for payload in payloads if payload is not None]
        if len(found) < len(payloads):
            gone = [index for index, payload in zip(plan.indices, payloads, strict=True) if payload is None]
            raise StoreError(
                f"the groups of iteration {plan.iteration} in the log",
                f"no payload of {gone}",
                "They are released: resume from a newer checkpoint. Otherwise run `polyreme audit`.",
            )
        return found

    async def commits(self, after_id: str) -> list[tuple[str, Line]]:
        """All retained staged and served versions after `after_id` ("0": from the first one).

        Fields: replica, version, term, state ("staged" or "served"); of a served one also stall_seconds, reload_seconds.
        """
        return await self.run.read_json("commits", after_id, block_ms=0, count=2 * COMMITS_BOUND)  # the bound is approximate

    async def failed_fraction(self, window: int = 50) -> float:
        """Failed groups among the newest `window` that are not in flight, as a fraction of `window`."""
        run = self.run
        first, count, flying = await asyncio.gather(
            run.redis.hget(run.key("meta"), "first_group"),
            run.redis.hlen(run.key("ledger")),
            run.redis.zcard(run.key("in_flight")),
        )
        start = int(first or 0)
        newest = range(start + count - 1, max(start - 1, start + count - 1 - window - flying), -1)
        rows = await run.redis.hmget(run.key("ledger"), list(newest)) if newest else []
        settled = [row for row in rows if row is not None and not row.startswith(b"admitted")][:window]
        return sum(bool(row.startswith(b"failed")) for row in settled) / window

    async def audit(self) -> Audit:
        """Counts every state and finds missing or duplicate groups."""
        return (await LogSnapshot.take(self.run)).audit()

    @property
    def _pass_rates(self) -> str:
        return self.run.key("pass_rates")
