"""One episode's policy: it samples an answer to messages, and keeps the exact tokens of the conversation.

Invariant: a turn's context is that of the turn that it follows, its answer, and what the chat template writes behind an answer
for the new messages (see `trajectories`). A turn counts only when it is complete, so a session that ends in mid-turn has the
turns before. Several turns may be sampled at the same time; what they are does not depend on the order in which they end.
"""

import asyncio
import json
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.api.v1.environment_pb2 import SessionTurn
from polyreme.dataset.chat import Message
from polyreme.dataset.columns import TokenIds
from polyreme.experience.records import RewardPart, SampleRecord, ToolCall
from polyreme_trainer.data.tail import Tail, Tools
from polyreme_trainer.orchestrator.environment.episode_clock import EpisodeClock
from polyreme_trainer.orchestrator.environment.protocol import Task
from polyreme_trainer.orchestrator.environment.shared_budget import SharedBudget
from polyreme_trainer.orchestrator.environment.trajectories import Begun, Trajectories, Trajectory
from polyreme_trainer.orchestrator.environment.transcript import Transcript
from polyreme_trainer.orchestrator.environment.turn_text import TurnText, opens_thought
from polyreme_trainer.orchestrator.generation.generate import GenerateOptions, Generation
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout, PartialRollouts
from polyreme_trainer.orchestrator.generation.sampler import Sampler
from polyreme_trainer.orchestrator.generation.token_budget import TokenBudget
from polyreme_trainer.orchestrator.prompts.prompt_order import sequence_seed

Tell = Callable[[np.ndarray, str], None]
"""Gets the context of a turn, int32 [c], and what its text goes on with."""


@dataclass(frozen=True)
class Bounds:
    """The bounds of an episode: turns, tokens of a trajectory with its prompt, and wall-clock seconds."""

    turns: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class SampledTurn:
    """A turn's message without special tokens, the same with them but without the stop token, whether it was cut at its maximum
    length, the tokens before it, int32 [c], and its own, int32 [t], with their log-probabilities, float32 [t]."""

    text: str
    raw: str
    is_cut: bool
    context: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray


class EpisodeOverError(Exception):
    """The episode has reached a bound. `outcome` is one of pb.OUTCOME_TURNS, pb.OUTCOME_TOKENS and pb.OUTCOME_TIME."""

    def __init__(self, outcome: int) -> None:
        super().__init__(pb.Outcome.Name(outcome))
        self.outcome = outcome


class EpisodeSession:
    """The policy in one episode of a task.

    Args:
        number: the number of the episode within its group, which determines its seeds.
        temperature: of an episode that is not trained on, 0 for a greedy one; None: the run's.
        budget: that of the run, for an episode that is trained on.

    Attributes:
        tools: what the chat template declares in the context of the next answer to begin; None: nothing.
        clock: the episode's seconds.
    """

    def __init__(
        self,
        sampler: Sampler,
        tail: Tail,
        task: Task,
        number: int,
        bounds: Bounds,
        temperature: float | None = None,
        budget: TokenBudget | None = None,
    ) -> None:
        self._sampler, self._tail, self._task, self._bounds, self.number = sampler, tail, task, bounds, number
        self._temperature, self._budget = temperature, budget if temperature is None else None
        self.begin()

    def begin(self) -> None:
        """Begins the episode, when its environment is there. What an environment that was lost has left is forgotten."""
        self._trajectories = Trajectories(self._sampler.template, self._tail, self._task.prompt.ids)
        self._transcript = Transcript(self._task.prompt.plain)
        self._begun, self._over = 0, int(pb.OUTCOME_UNSPECIFIED)
        self._shared = SharedBudget(self._budget, self._task.admission.index, self._trajectories)
        self.tools: Tools = None
        self.clock = EpisodeClock(self._bounds.seconds)

    def __contains__(self, turn: int) -> bool:
        """Whether a turn of this number is complete."""
        return turn in self._trajectories

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, for display."""
        return self._transcript.messages({each.number: place for place, each in enumerate(self._trajectories)})

    @property
    def temperature(self) -> float:
        """The run's temperature. (Of all episodes: an agent must not know which of them are trained on.)"""
        return self._sampler.config.rollout.temperature

    @property
    def turns(self) -> int:
        """The number of complete turns."""
        return self._trajectories.turns

    @property
    def score(self) -> float:
        """The sum of the turns' rewards."""
        return self._trajectories.score

    @property
    def outcome(self) -> int:
        """The outcome of the episode if it ends now."""
        if self._over:
            return self._over
        if self.clock.seconds_left <= 0:
            return pb.OUTCOME_TIME
        return pb.OUTCOME_LENGTH if (last := self._trajectories.last) and _is_cut(last) else pb.OUTCOME_STOP

    async def answer(
        self,
        messages: Sequence[Message],
        *,
        number: int | None = None,
        after: int | None = None,
        max_tokens: int | None = None,
        prompt: str | TokenIds | None = None,
        stop: Sequence[str] = (),
        stop_ids: Sequence[int] = (),
        tell: Tell | None = None,
    ) -> SampledTurn:
        """Samples a turn. One that is cancelled is no part of a trajectory, but is shown among the messages.

        Args:
            messages: what came since the answer that it follows. Without one, the whole conversation; none: the row's prompt.
            number: that of the turn, above those of all turns that have begun. None: the next one.
            after: the number of the turn that it follows, from 1; 0: none. None: the newest turn, if there is one.
            max_tokens: upper bound of its tokens, in addition to rollout.max_new_tokens.
            prompt: in place of messages and without the chat template, what stands behind the turn that it follows, as text; or
                the whole context, as tokens, of which those of an earlier turn may be the beginning.
            stop: texts that end it, with the token that completes one of them.
            stop_ids: tokens that end it too.
            tell: is told what the turn's text goes on with, as it is sampled, and the turn's context.

        Raises:
            EpisodeOverError: the episode has reached a bound.
            DataError: the chat template refuses the messages, or a token is unknown.
            GenerateError, UnavailableError: see `generate`.
        """
        if self._begun >= self._bounds.turns:
            raise self._end(pb.OUTCOME_TURNS)
        newest = self._trajectories.newest
        trajectory, context = behind = self._behind(messages, newest if after is None else after, prompt)
        shown = messages if prompt is None else self._prompt_shown(prompt)
        room = self._bounds.tokens - len(context)
        if room < 1:
            raise self._end(pb.OUTCOME_TOKENS)
        self._begun += 1
        number = self._begun if number is None else number
        began, wanted = time.monotonic(), self._wanted(number, trajectory, context, min(room, max_tokens or room))
        text = None if tell is None else TurnText(self._sampler.template, partial(tell, context))
        with self._trajectories.growing(trajectory), self._shared.turn(number, wanted.blank()) as rollouts:
            try:
                async with self.clock.limited() as limit:
                    sample = await self._sample(wanted, rollouts, number, trajectory, text)
            except TimeoutError:
                if limit.expired():
                    raise self._end(pb.OUTCOME_TIME) from None
                raise
            except asyncio.CancelledError:
                (so_far,) = self._sampler.template.decode([rollouts.samples[0].token_ids().tolist()], special=False)
                self._transcript.add_withdrawn(number, shown, so_far)
                raise
            self._end_at(sample, stop, stop_ids)
            self._trajectories.add(number, behind, sample, time.monotonic() - began)
        turn = self._told(number, shown, behind, sample)
        if text is not None:
            text.check(turn.text)
        return turn

    def reward(self, reward: float, calls: Sequence[ToolCall] = (), turn: int | None = None) -> None:
        """Adds to the reward and the tool calls of a complete turn, by its number; None: the newest one."""
        self._trajectories.reward(self._trajectories.newest if turn is None else turn, reward, calls)

    def withdraw(self, number: int) -> None:
        """Takes out a complete turn that none follows, and shows it as one that was cancelled."""
        if self._trajectories.remove(number):
            self._transcript.withdraw(number)

    def kept(self) -> SessionTurn:
        """The newest turn, for `restore` in another session."""
        kept = self._trajectories.kept()
        kept.messages_json = json.dumps(self._transcript.added(self._trajectories.newest))
        return kept

    def restore(self, turn: SessionTurn) -> None:
        """Continues after a turn that `kept` told, behind those before it. Raises DataError when it does not follow them."""
        self._begun += 1
        self._trajectories.restore(self._begun, turn)
        self._transcript.restore(self._begun, json.loads(turn.messages_json))

    def trajectories(self, parts: Sequence[RewardPart]) -> list[SampleRecord]:
        """The records of the episode's tokens, after at least one turn. Their score is the sum of all turns' rewards."""
        return self._trajectories.records(parts, trained=self._temperature is None)

    def token_texts(self, turn: SampledTurn) -> list[str]:
        """The text of each token of a turn; see `Template.token_texts`."""
        return self._sampler.template.token_texts(turn.ids.tolist())

    def opens_thought(self, context: np.ndarray) -> bool:
        """See `turn_text.opens_thought`."""
        return opens_thought(self._sampler.template, context)

    def _end(self, outcome: int) -> EpisodeOverError:
        self._over = outcome
        return EpisodeOverError(outcome)

    def _behind(self, messages: Sequence[Message], after: int, prompt: str | TokenIds | None) -> Begun:
        if isinstance(prompt, TokenIds):
            return self._trajectories.behind_ids(prompt)
        if prompt is not None:
            return self._trajectories.behind_text(after, prompt)
        return self._trajectories.behind_messages(after, messages, self.tools)

    def _prompt_shown(self, prompt: str | TokenIds) -> list[Message]:
        """A prompt as a message, for display. Raises DataError for unknown tokens."""
        text = prompt if isinstance(prompt, str) else self._sampler.template.render([prompt])[0]
        return [{"role": "user", "content": text}]

    def _wanted(self, number: int, trajectory: Trajectory, context: np.ndarray, room: int) -> Generation:
        before = (trajectory.number << 32) + len(context) - len(trajectory.prompt)
        admission = self._task.admission
        group = self._sampler.of_group(admission, context)
        return replace(
            group,
            name=f"{group.name}-{self.number}-{number}",
            count=1,
            max_new=min(group.max_new, room),
            temperature=group.temperature if self._temperature is None else self._temperature,
            seed=partial(_seed, self._sampler.config.seed, admission.index, admission.attempt, self.number, before),
        )

    async def _sample(
        self, wanted: Generation, rollouts: PartialRollouts, number: int, trajectory: Trajectory, text: TurnText | None
    ) -> PartialRollout:
        last = trajectory.sampled[-1] if trajectory.sampled else self._trajectories.last
        prefer = last.replicas[-1] if last and last.replicas else None
        options = GenerateOptions(rollouts, self._shared.next_part(number, self.clock), prefer, text)
        return (await self._sampler.sample(wanted, options))[0]

    def _end_at(self, sample: PartialRollout, stop: Sequence[str], stop_ids: Sequence[int]) -> None:
        """Drops the tokens behind the first of these, and behind the one that completes the first of these texts."""

        def has_one(length: int) -> bool:
            (text,) = self._sampler.template.decode([ids[:length]], special=False)
            return any(each in text for each in stop)

        ids = sample.token_ids().tolist()
        ends = [place + 1 for place, id in enumerate(ids) if id in stop_ids][:1]
        if stop and has_one(len(ids)):
            ends.append(bisect_left(range(len(ids)), True, key=has_one))
        if ends:
            sample.shorten(min(ends))
            sample.finish_reason = pb.FINISH_REASON_STOP

    def _told(self, number: int, messages: Sequence[Message], behind: Begun, sample: PartialRollout) -> SampledTurn:
        trajectory, context = behind
        template, ids = self._sampler.template, sample.token_ids().tolist()
        (text,) = template.decode([ids], special=False)
        (raw,) = template.decode([ids[:-1] if ids[-1] in template.stop_ids else ids], special=True)
        self._transcript.add(number, messages, text, trajectory.number, len(trajectory.turns) - 1)
        return SampledTurn(text, raw, _is_cut(sample), context, sample.token_ids(), sample.token_logprobs())


def _is_cut(sample: PartialRollout) -> bool:
    return sample.finish_reason == pb.FINISH_REASON_LENGTH


def _seed(seed: int, group: int, attempt: int, episode: int, before: int, _: int, prefix: int) -> int:
    """The seed of a token after `before` + `prefix` tokens of its trajectory; each trajectory counts from a number of its own."""
    return sequence_seed(seed, group, attempt, episode, before + prefix)
