"""The experience log: the state and the payload of every group.

    (none) -> admitted -> appended -> planned -> released        admitted -> dropped        admitted -> failed

Invariant: every change is one script that checks the caller's term, so a replaced process can change nothing. Every count (in
flight, appended, planned) is derived from the log itself. docs/reference/log.md has the full table.
"""

import json
import math
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from polyreme.errors import StaleTermError
from polyreme.experience.log_reader import COMMITS_BOUND, Admission, LogReader, Plan, Unplanned
from polyreme.experience.metric_records import Line
from polyreme.experience.pass_rates import PassRates, Tally
from polyreme.experience.run import Run, RunState
from polyreme.experience.scripts import StaleAttemptError, TransitionError
from polyreme.experience.shard import ONLY, Shard

__all__ = ["Admission", "Plan", "StaleAttemptError", "TransitionError", "Unplanned"]  # also from here


class Writer(StrEnum):
    """The writers of the log: the orchestrators admit and append; the learner plans, releases and pushes weights."""

    ORCHESTRATOR = "orchestrator"
    LEARNER = "learner"


@dataclass(frozen=True)
class Term:
    """A term of a writer, of which each orchestrator is one. Only the holder of the highest counter can change the log."""

    writer: Writer
    counter: int
    token: str

    def __str__(self) -> str:
        return f"{self.counter} {self.token}"


@dataclass(frozen=True)
class PartialRolloutPart:
    """The tokens that attempt `attempt` of group `index` has generated since its part `number` - 1."""

    index: int
    attempt: int
    number: int
    payload: bytes


class ExperienceLog(LogReader):
    """The log of one run, to read and to change.

    Args:
        run: its run.
        term: a term that another object of this process took (the learner's publisher has its own connection). None until `take`.
        shard: the orchestrator that writes, if it is not the only one.
    """

    def __init__(self, run: Run, term: Term | None = None, shard: Shard = ONLY) -> None:
        super().__init__(run)
        self.term, self.shard = term, shard

    async def take(self, writer: Writer) -> Term:
        """Takes over as `writer`. Every later change by its former holder raises StaleTermError."""
        token = uuid.uuid4().hex
        role = self.shard.name if writer is Writer.ORCHESTRATOR else writer.value
        counter = await self.run.scripts.call("take", role, token)
        self.term = Term(writer, int(counter), token)
        return self.term

    # -- an orchestrator's changes, to its own groups; the leading one admits and evaluates

    async def admit(self, most: int = 1) -> list[Admission]:
        """Admits up to `most` next groups. Admits none if they would exceed max_staleness, or before the learner has begun."""
        return [_admission(row) for row in await self.change("admit", most, keys=[self.run.once()])]

    async def readmit(self, index: int, attempt: int, reason: str, max_attempts: int) -> Admission | None:
        """Admits the next attempt after `attempt`, which failed for `reason` or expired.

        Returns:
            The admission, at the current version or (while a resumed learner catches up) at its previous one. None when that was
            the last attempt, and the group has failed.

        Raises:
            StaleAttemptError: the group is in another state.
        """
        reply = await self.change("readmit", index, attempt, _one_line(reason), max_attempts)
        return None if reply is None else _admission(reply)

    async def save_partial_rollouts(self, parts: Sequence[PartialRolloutPart]) -> None:
        """Saves partial rollouts of attempts in flight, until these end. A part replaces all parts from its number on.

        Skips attempts that have ended.

        Raises:
            TransitionError: a part's number is beyond the next one.
        """
        words: list[bytes | int] = [word for part in parts for word in (part.index, part.attempt, part.number, part.payload)]
        await self.change("draft", *words)

    async def set_paused(self, indices: Collection[int]) -> None:
        """Records which of its groups in flight wait for the learner's next version; all others are sampled.

        A paused group is not a straggler. When it continues, its time counts from then on.
        """
        await self.change("pause", self.shard.number, *sorted(indices))

    async def append(
        self, index: int, attempt: int, payload: bytes, oldest_version: int, mean_reward: float, tally: Tally | None = None
    ) -> bool:
        """Appends a scored group.

        Args:
            index, attempt: of its admission.
            payload: the serialised group (`record_codec.encode_group`).
            oldest_version: the oldest policy version among its tokens; not below the admission's.
            mean_reward: of its samples; finite.
            tally: counts in the pass rate of its prompt; None: nothing is counted.

        Returns:
            False when this attempt is in the log already, for example after a repeated append.

        Raises:
            StaleAttemptError: the attempt is not current; discard the payload.
            TransitionError: the group was never admitted, or its tokens are older than its admission allows.
        """
        if not math.isfinite(mean_reward):
            raise ValueError(f"group {index}: the mean reward must be finite, found {mean_reward}")
        words = (index, attempt, oldest_version, repr(float(mean_reward)), payload, *_words(tally))
        return bool(await self.change("append", *words, keys=[self._pass_rates]))

    async def drop(self, index: int, attempt: int, reason: str, mean_reward: float, tally: Tally | None = None) -> bool:
        """Drops a scored group that is not used for training, without its payload. Returns False when it was dropped before.

        Its `tally` counts as in `append`.

        Raises:
            StaleAttemptError: as in `append`.
        """
        if not math.isfinite(mean_reward):
            raise ValueError(f"group {index}: the mean reward must be finite, found {mean_reward}")
        words = (index, attempt, repr(float(mean_reward)), _one_line(reason), *_words(tally))
        return bool(await self.change("drop", *words, keys=[self._pass_rates]))

    async def skip(self, index: int, attempt: int, reason: str) -> bool:
        """Drops a group that was not sampled. Returns False when it was dropped before. Raises StaleAttemptError as `append`."""
        words = (index, attempt, "-", _one_line(reason), *_words(None))
        return bool(await self.change("drop", *words, keys=[self._pass_rates]))

    async def report(self, done: Line) -> None:
        """Stores what this orchestrator has done in its term, for the leading one's records."""
        assert self.term is not None
        text = json.dumps({"term": self.term.counter, "done": done})
        await self.run.redis.hset(self.run.key("orchestrators"), self.shard.number, text)

    async def set_evaluated(self, version: int) -> None:
        """Records that evaluations up to `version` have ended or were skipped."""
        await self.change("evaluated", version)

    # -- the learner's changes

    async def begin(self, version: int, pass_rates: PassRates | None = None) -> None:
        """Sets the learner's checkpoint to `version` (0: before the first iteration). Later plans stay and are replayed.

        An empty log may begin at any version (a fork), and takes over `pass_rates` when it begins for the first time.

        Raises:
            TransitionError: groups that the replay needs are released, or the checkpoint is ahead of the log.
        """
        lines = "\n".join(f"{prompt} {rate}" for prompt, rate in (pass_rates or {}).items())
        await self.change("begin", version, lines, keys=[self._pass_rates])

    async def set_version(self, version: int) -> None:
        """Records that iteration `version` is trained. Raises TransitionError unless it is the next one."""
        await self.change("version", version)

    async def plan(self, iteration: int, straggler_timeout: float) -> Plan | None:
        """The plan of `iteration`, created if it does not exist; None when it cannot be created yet.

        Waits for groups in flight whose tokens would otherwise grow older than max_staleness. An attempt that has been in
        flight for `straggler_timeout` seconds while a plan waits for it, without a pause, expires: its next attempt begins.

        Raises:
            TransitionError: `iteration` is beyond the next one.
        """
        text = await self.change("plan", iteration, int(straggler_timeout * 1000))
        return None if text is None else Plan.parse(iteration, text)

    async def wait_plan(self, iteration: int, straggler_timeout: float) -> Plan | None:
        """Waits for `plan`. None when the run drains or has ended."""

        async def look() -> Plan | RunState | None:
            if plan := await self.plan(iteration, straggler_timeout):
                return plan
            state, _ = await self.run.state()
            return state if state.ended or state is RunState.DRAINING else None

        found = await self.run.until(look)
        return found if isinstance(found, Plan) else None

    async def release(self, iteration: int) -> int:
        """Deletes the payloads of plans <= `iteration`, which no retained checkpoint needs. Returns the new low water mark.

        Raises:
            TransitionError: `iteration` is not trained yet.
        """
        return int(await self.change("release", iteration))

    async def ack_stage(self, replica_id: str, version: int, term: int) -> None:
        """Records that a replica has staged `version` and is about to commit it under the learner's `term`."""
        await self._record_replica(replica_id, version, term, {})

    async def ack_commit(self, replica_id: str, version: int, term: int, stall_s: float, reload_s: float) -> None:
        """Records that a replica serves `version`, committed under the learner's `term`."""
        await self._record_replica(replica_id, version, term, {"stall_seconds": stall_s, "reload_seconds": reload_s})

    async def _record_replica(self, replica_id: str, version: int, term: int, swap: dict[str, float]) -> None:
        state = "served" if swap else "staged"
        text = json.dumps({"replica": replica_id, "version": version, "term": term, "state": state, **swap})
        keys = [self.run.key("commits"), self.run.once()]
        await self.change("commit", COMMITS_BOUND, replica_id, text, keys=keys)

    async def change(self, script: str, *args: bytes | str | int, keys: list[str] | None = None) -> Any:
        """Calls a script that checks this writer's term. Raises StaleTermError without one."""
        if self.term is None:
            raise StaleTermError(f"a term for `{script}`", "none taken", "Call take() first.")
        return await self.run.scripts.call(script, str(self.term), *args, keys=keys or [])


def _admission(reply: Sequence[bytes | int]) -> Admission:
    return Admission(*(int(word) for word in reply))


def _words(tally: Tally | None) -> tuple[str | int, ...]:
    """A tally as a script's arguments; no prompt: nothing is counted."""
    return ("", 0, 0) if tally is None else (tally.prompt, tally.samples, tally.solved)


def _one_line(text: str) -> str:
    """A reason in the form of a ledger row."""
    return " ".join(text.split())[:500] or "unknown"
