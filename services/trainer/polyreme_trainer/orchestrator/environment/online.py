"""The environment of a running product: its sessions become groups of the log when they have their rewards.

Invariant: nothing is admitted. A group is appended together with the end of its sessions, so each is trained on once, and all
that decides about a session is in the log. A session without a reward is dropped with a reason and never gets a number.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.config.environment import OnlineConfig
from polyreme.errors import DataError
from polyreme.experience.ledger import Admission, ExperienceLog
from polyreme.experience.metric_records import ServiceNotice
from polyreme.experience.online import REASONS, OnlineSession, OnlineSessions
from polyreme.experience.record_codec import encode_group
from polyreme.experience.records import GroupRecord
from polyreme.experience.run import Run, RunState
from polyreme_trainer.data.prompt_store import Prompt
from polyreme_trainer.data.tail import Tail
from polyreme_trainer.orchestrator.environment.agent_turn import kept_turn, parsed_turn, unreadable
from polyreme_trainer.orchestrator.environment.episodes import Ending, finished_episode
from polyreme_trainer.orchestrator.environment.finished import Finished, placed
from polyreme_trainer.orchestrator.environment.online_turns import OnlineTurns
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError, Played, Task
from polyreme_trainer.orchestrator.environment.session import Bounds, EpisodeSession
from polyreme_trainer.orchestrator.environment.wire import read_calls
from polyreme_trainer.orchestrator.generation.sampler import Sampler

logger = logging.getLogger(__name__)


@dataclass
class _Wait:
    """A wait for the groups of an iteration, and what was told of it."""

    planned: int = -1
    since: float = field(default_factory=time.monotonic)
    told: tuple[float, int] = (0.0, -1)


class OnlineExperience:
    """Samples the turns of sessions, and makes groups of those that are complete.

    Args:
        log: has the orchestrator's term.
        told_seconds: between two notices that the run waits for experience.
    """

    def __init__(
        self,
        run: Run,
        sampler: Sampler,
        tail: Tail,
        bounds: Bounds,
        settings: OnlineConfig,
        log: ExperienceLog,
        told_seconds: float = 30.0,
    ) -> None:
        assert sampler.config.environment is not None
        self._run, self._sampler, self._tail, self._bounds, self._settings, self._log = run, sampler, tail, bounds, settings, log
        self._sessions = OnlineSessions(run, settings.max_age)
        self._turns = OnlineTurns(run, sampler.config.environment, self._sampled)
        self._tasks: dict[str, str] = {}
        self._served, self._wait, self._told_seconds = 0, _Wait(), told_seconds

    async def wait_ready(self) -> None:
        await self._turns.wait_ready()

    async def refresh(self) -> None:
        await self._turns.refresh()

    async def close(self) -> None:
        await self._turns.close()

    async def play(self, task: Task) -> Played:
        """Refuses: a running product begins its sessions itself."""
        raise EpisodeError(f"expected groups of a running product; found group {task.admission.index}, which was admitted")

    async def metrics(self) -> dict[str, float]:
        """See `Environment`."""
        counts = await self._sessions.counts()
        names = ("open", "complete", "trained", "refused", "unrecorded", *(f"dropped {reason}" for reason in REASONS))
        return {f"online/{name.replace(' ', '_')}": float(counts.get(name, 0)) for name in names}

    async def collect(self) -> bool:
        """See `Environment`."""
        config, unplanned = self._sampler.config, await self._log.unplanned()
        oldest = max(0, unplanned.planned - config.max_staleness)
        self._served = max(
            0, min(oldest, unplanned.version)
        )  # after a resume, users need not wait until the learner has caught up
        for id, reason in await self._sessions.too_old(oldest, self._settings.max_age):
            await self._drop(id, reason)
        iterations = min(unplanned.version + 1 + config.max_staleness, config.iterations) - unplanned.planned
        room = iterations * config.groups_per_iteration - len(unplanned.appended)
        appended = 0
        for ids in await self._complete() if room > 0 else ():
            if appended >= room or not await self._append(ids):
                break
            appended += 1
        await self._tell(unplanned.planned, len(unplanned.appended) + appended)
        return True

    async def _complete(self) -> list[list[str]]:
        """The ids of each complete group, those with the oldest rewards first."""
        ids = await self._sessions.rewarded()
        known = {id: self._tasks.get(id) or await self._sessions.task(id) for id in ids}
        self._tasks = {id: task for id, task in known.items() if task is not None}
        return complete_groups([(id, self._tasks[id]) for id in ids if id in self._tasks], self._sampler.config.group_size)

    async def _append(self, ids: Sequence[str]) -> bool:
        """Appends a group. Returns whether there may be room for another one."""
        episodes: list[Finished] = []
        prompt = np.zeros(0, np.int32)
        try:
            for number, id in enumerate(ids):
                kept = await self._sessions.read(id)
                exchanges = [_exchange(id, turn) for turn in kept.turns]
                if not number:
                    prompt = np.frombuffer(parsed_turn(exchanges[0].answer.record).context, "<i4")
                episodes.append(self._episode(kept, exchanges, prompt, number))
            samples, records = [sample for each, _ in placed(episodes) for sample in each], [record for _, record in episodes]
            index = await self._log.next_index()
            text, task = self._sampler.template.decode([prompt.tolist()], special=True)[0], self._tasks[ids[0]]
            group = GroupRecord(index, 1, prompt, samples, prompt=text, label=task, began=time.time(), episodes=records)
            payload = encode_group(group)
        except (DataError, EpisodeError) as error:
            bad = ids[min(len(episodes), len(ids) - 1)]
            logger.warning("session %s: %s", bad, error)
            await self._drop(bad, "invalid")
            return True
        done = await self._sessions.append(self._log, index, ids, payload, group.oldest_version, group.mean_reward)
        return done is not None

    def _episode(self, kept: OnlineSession, exchanges: Sequence[pb.SessionExchange], prompt: np.ndarray, number: int) -> Finished:
        """The records of a session. Raises DataError or EpisodeError."""
        session = self._session(kept.id, prompt, number)
        for exchange in exchanges:
            if exchange.calls and exchange.after in session:
                session.reward(0.0, read_calls(exchange), exchange.after)
            session.restore(parsed_turn(exchange.answer.record))
        return finished_episode(session, Ending(session.outcome, kept.reward or 0.0))

    def _session(self, id: str, prompt: np.ndarray, number: int = 0) -> EpisodeSession:
        """The policy in a session, which has seeds of its own."""
        task = Task(Admission(int(id, 16), 1, self._served), Prompt(prompt, "", "", "{}", ""))
        return EpisodeSession(self._sampler, self._tail, task, number, self._bounds)

    async def _sampled(self, request: pb.AgentRequest, tell: Callable[[pb.Delta], None]) -> pb.Answer:
        """The turn that a request asks for, of which it tells meanwhile. Raises as `OnlineTurns` says."""
        return await kept_turn(request, self._session(request.session, np.zeros(0, np.int32)), tell)

    async def _drop(self, id: str, reason: str) -> None:
        if await self._sessions.drop(self._log, id, reason):
            logger.warning("session %s is dropped: %s", id, reason)

    async def _tell(self, planned: int, appended: int) -> None:
        """Tells that the run waits for groups and how long, and stops it after max_wait."""
        groups, now, limit = self._sampler.config.groups_per_iteration, time.monotonic(), self._settings.max_wait
        if planned != self._wait.planned or appended >= groups or planned >= self._sampler.config.iterations:
            self._wait = _Wait(planned)
            return
        found = f"{appended} of {groups} groups for iteration {planned + 1}"
        if now - self._wait.since > limit:
            reason = f"no experience: {found} within environment.online.max_wait = {limit:g} s"
            await self._run.set_state(RunState.DRAINING, reason)
        elif now - max(self._wait.told[0], self._wait.since) > self._told_seconds and appended != self._wait.told[1]:
            self._wait.told = now, appended
            left, counts = limit - (now - self._wait.since), await self._sessions.counts()
            sessions = f"{counts['open']} sessions are open, {counts['complete']} have a reward and wait for their group"
            text = f"waiting for experience: {found}; {sessions}; the run stops in {left:.0f} s if they do not come"
            logger.info("%s", text)
            await self._run.emit(ServiceNotice(service="orchestrator", text=text, waiting=True))


def complete_groups(rewarded: Sequence[tuple[str, str]], size: int) -> list[list[str]]:
    """Ids of each group of `size` sessions of a task, in order of their last ones. `rewarded`: ids and tasks, oldest first. Pure.

    A group of one needs no task.
    """
    waiting: dict[str, list[str]] = {}
    found = []
    for id, task in rewarded:
        ids = waiting.setdefault(task, [])
        ids.append(id)
        if len(ids) == size:
            found.append(waiting.pop(task))
    return found


def _exchange(id: str, stored: bytes) -> pb.SessionExchange:
    try:
        return pb.SessionExchange.FromString(stored)
    except DecodeError as error:
        raise unreadable(f"a turn of session {id}", error) from None
