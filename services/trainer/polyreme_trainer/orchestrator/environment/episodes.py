"""The environment of several turns: every episode of a group has a session of its own, and a host that plays it.

Invariant: an episode has an outcome and a reward that its host gave, or the attempt at its group fails. A host that is lost costs
its running episodes a try; an episode begins again with the same seeds.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from polyreme.config.evaluation import PART
from polyreme.experience.records import EpisodeRecord, RewardPart, ToolCall
from polyreme.process.tasks import together
from polyreme_trainer.data.tail import Tail
from polyreme_trainer.orchestrator.environment.finished import Finished, FinishedEpisodes
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError, Played, Task
from polyreme_trainer.orchestrator.environment.scored import EpisodeName, scored
from polyreme_trainer.orchestrator.environment.session import Bounds, EpisodeSession
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.sampler import Sampler
from polyreme_trainer.orchestrator.generation.token_budget import TokenBudget
from polyreme_trainer.orchestrator.scoring.scoring import Scoring


class HostLostError(EpisodeError):
    """The host of an episode was lost. Another one may play it."""


@dataclass(frozen=True)
class Ending:
    """How an episode ended.

    Attributes:
        outcome: one of pb.OUTCOME_...
        reward: of the last turn, in addition to what the session has.
        parts: numbers to report, by name.
        seconds: wall-clock seconds in the environment.
        calls: the tool calls of the last turn, in addition to what the session has.
    """

    outcome: int
    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    calls: Sequence[ToolCall] = ()


class Host(Protocol):
    """Plays episodes. `wait_ready`, `refresh` and `close` are those of `Environment`."""

    async def wait_ready(self) -> None: ...

    async def refresh(self) -> None: ...

    async def close(self) -> None: ...

    async def play(self, task: Task, session: EpisodeSession) -> Ending:
        """One episode, within the bounds of its session.

        Raises:
            HostLostError: it can be played again elsewhere.
            EpisodeError: the environment failed.
            UnavailableError: there is no host.
        """


class Episodes:
    """Plays the episodes of a task at the same time.

    Args:
        tries: how often an episode may begin.
        scoring: the run's rewards, which replace those of the environment, and its teacher.
        budget: the run's token budget, for episodes that are trained on.
    """

    def __init__(
        self,
        sampler: Sampler,
        tail: Tail,
        host: Host,
        partial_log: PartialRolloutLog,
        bounds: Bounds,
        tries: int,
        scoring: Scoring,
        budget: TokenBudget | None = None,
    ) -> None:
        self._sampler, self._tail, self._host, self._partial_log = sampler, tail, host, partial_log
        self._bounds, self._tries, self._scoring, self._budget = bounds, tries, scoring, budget

    async def wait_ready(self) -> None:
        await self._host.wait_ready()

    async def refresh(self) -> None:
        await self._host.refresh()
        await self._scoring.refresh()

    async def close(self) -> None:
        await self._host.close()
        await self._scoring.close()

    async def collect(self) -> bool:
        return False

    async def metrics(self) -> dict[str, float]:
        return {}

    async def play(self, task: Task) -> Played:
        """See `Environment`."""
        config, began = self._sampler.config, time.monotonic()
        greedy = config.recipe.advantage.needs_greedy  # one more episode is the baseline of the others
        with self._partial_log.track(task.admission, FinishedEpisodes(task, config.group_size + greedy)) as finished:

            async def play(number: int) -> None:
                finished.add(number, await self.play_one(task, number, temperature=0.0 if number == config.group_size else None))

            await together([play(number) for number in finished.missing()])
            played, admission = time.monotonic(), task.admission
            names = [
                (self._sampler.run_id, admission.index, admission.attempt, number) for number in range(config.group_size + greedy)
            ]
            episodes = await self.scored(task, finished.ordered(), names)
        samples, records = [sample for each, _ in episodes for sample in each], [record for _, record in episodes]
        return Played(samples, records, generate_seconds=played - began, score_seconds=time.monotonic() - played)

    async def scored(self, task: Task, episodes: Sequence[Finished], names: Sequence[EpisodeName]) -> list[Finished]:
        """See `scored`."""
        return await scored(self._scoring, self._sampler.template, task, episodes, names)

    async def play_one(self, task: Task, number: int, *, temperature: float | None = None) -> Finished:
        """Episode `number` of a task, as its environment ends it: `scored` follows. Raises as `play`.

        Args:
            temperature: of an episode that is not trained on; None: the run's.
        """
        tries = 0
        while True:
            session = EpisodeSession(self._sampler, self._tail, task, number, self._bounds, temperature, self._budget)
            try:
                return finished_episode(session, await self._host.play(task, session))
            except HostLostError:
                tries += 1
                if tries >= self._tries:
                    raise


def finished_episode(session: EpisodeSession, ending: Ending) -> Finished:
    """The records of an episode. Raises EpisodeError when there is nothing to train on."""
    if not session.turns:
        raise EpisodeError("expected at least one turn in an episode; found none: its first messages leave no room, or no time")
    if not all(map(math.isfinite, ending.parts.values())):
        raise EpisodeError(f"expected finite numbers of the environment; found {dict(ending.parts)}")
    session.reward(ending.reward, ending.calls)
    score = session.score
    parts = [RewardPart(PART, score, score), *(RewardPart(f"{PART}/{name}", each, each) for name, each in ending.parts.items())]
    return session.trajectories(parts), EpisodeRecord(ending.outcome, json.dumps(session.messages), ending.seconds)
