"""The environment of several turns: every episode of a group has a session of its own, and a host that plays it.

Invariant: an episode has an outcome and a reward that its host gave, or the attempt at its group fails. A host that is lost costs its running
episodes a try; an episode begins again with the same seeds.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from polyreme.experience.records import EpisodeRecord, RewardCall, RewardPart, ToolCall
from polyreme_trainer.data.tail import Message, Tail
from polyreme_trainer.orchestrator.environment.finished import Finished, FinishedEpisodes
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError, Played, Task
from polyreme_trainer.orchestrator.environment.session import Bounds, EpisodeSession
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.sampler import Sampler
from polyreme_trainer.orchestrator.scoring.reward_client import RewardClient
from polyreme_trainer.orchestrator.scoring.score_call import Question
from polyreme_trainer.orchestrator.scoring.scoring import by_rewards
from polyreme_trainer.orchestrator.tasks import together

PART = "environment"
"""The name of the environment's reward among the parts of a score."""
CONVERSATION = "conversation"
"""The key of an episode's messages in the metadata that a reward gets."""
_SHOWN_CHARS = 1 << 14


class HostLostError(EpisodeError):
    """The host of an episode was lost. Another one may play it."""


@dataclass(frozen=True)
class Ending:
    """How an episode ended.

    Attributes:
        outcome: one of pb.OUTCOME_...
        reward: of the last turn, in addition to what the session has; finite.
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
        rewards: what scores the last answer of an episode; None: its host gives all rewards.
    """

    def __init__(
        self,
        sampler: Sampler,
        tail: Tail,
        host: Host,
        partial_log: PartialRolloutLog,
        bounds: Bounds,
        tries: int,
        rewards: RewardClient | None = None,
    ) -> None:
        self._sampler, self._tail, self._host, self._partial_log = sampler, tail, host, partial_log
        self._bounds, self._tries, self._rewards = bounds, tries, rewards

    async def wait_ready(self) -> None:
        await self._host.wait_ready()

    async def refresh(self) -> None:
        await self._host.refresh()
        if self._rewards is not None:
            await self._rewards.refresh()

    async def close(self) -> None:
        await self._host.close()
        if self._rewards is not None:
            await self._rewards.close()

    async def play(self, task: Task) -> Played:
        """See `Environment`."""
        config, began = self._sampler.config, time.monotonic()
        greedy = config.recipe.advantage.needs_greedy  # one more episode is the baseline of the others
        with self._partial_log.track(task.admission, FinishedEpisodes(task, config.group_size + greedy)) as finished:

            async def play(number: int) -> None:
                finished.add(number, await self.play_one(task, number, temperature=0.0 if number == config.group_size else None))

            await together([play(number) for number in finished.missing()])
            episodes = finished.ordered()
        samples, records = [sample for each, _ in episodes for sample in each], [record for _, record in episodes]
        return Played(samples, records, generate_seconds=time.monotonic() - began)

    async def play_one(self, task: Task, number: int, *, temperature: float | None = None) -> Finished:
        """Episode `number` of a task. Raises as `play`.

        Args:
            temperature: of an episode that is not trained on; None: the run's.
        """
        tries = 0
        while True:
            session = EpisodeSession(self._sampler, self._tail, task, number, self._bounds, temperature)
            try:
                ending = await self._host.play(task, session)
                break
            except HostLostError:
                tries += 1
                if tries >= self._tries:
                    raise
        _end(session, ending)
        if self._rewards is None:
            return _finished(session, ending, _parts(session.score, ending))
        return await self._scored(task, session, ending, self._rewards)

    async def _scored(self, task: Task, session: EpisodeSession, ending: Ending, rewards: RewardClient) -> Finished:
        """The records of an episode whose last answer the rewards score. They see the conversation in the row's metadata."""
        prompt, answer = task.prompt, session.last_turn
        metadata = json.loads(prompt.metadata_json or "{}") | {CONVERSATION: session.messages}
        place = (task.admission.index, task.admission.attempt, task.admission.version, session.number)
        name = (self._sampler.run_id, "episode", *place)
        question = Question(name, prompt.plain, answer.text, answer.raw, prompt.label, json.dumps(metadata), prompt.text)
        calls: list[list[RewardCall]] = [[]]
        (result,) = await rewards.score([question], calls)
        judged = by_rewards(result, None, *calls)
        if judged.token_rewards is not None:
            raise EpisodeError("expected a reward of the whole answer for an environment with tools; found rewards of tokens")
        session.reward(judged.score)
        samples, record = _finished(session, ending, judged.parts)
        return [replace(sample, calls=judged.calls) for sample in samples], record


def _end(session: EpisodeSession, ending: Ending) -> None:
    """Adds the reward of an episode's ending. Raises EpisodeError when there is nothing to train on."""
    if not session.turns:
        raise EpisodeError("expected at least one turn in an episode; found none: its first messages leave no room, or no time")
    if not all(math.isfinite(number) for number in (ending.reward, *ending.parts.values())):
        raise EpisodeError(f"expected finite rewards; found {ending.reward} and {dict(ending.parts)}")
    session.reward(ending.reward, ending.calls)


def _parts(score: float, ending: Ending) -> list[RewardPart]:
    return [RewardPart(PART, score, score), *(RewardPart(f"{PART}/{name}", each, each) for name, each in ending.parts.items())]


def _finished(session: EpisodeSession, ending: Ending, parts: Sequence[RewardPart]) -> Finished:
    """The records of an episode."""
    messages = json.dumps([_shown(message) for message in session.messages])
    return session.trajectories(parts), EpisodeRecord(ending.outcome, messages, ending.seconds)


def _shown(message: Message) -> dict[str, Any]:
    content = message.get("content")
    is_long = isinstance(content, str) and len(content) > _SHOWN_CHARS
    return {**message, "content": content[:_SHOWN_CHARS] + " ..."} if is_long and isinstance(content, str) else message
