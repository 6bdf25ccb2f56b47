"""One episode's policy: it samples an answer to messages, and keeps the exact tokens of the conversation.

Invariant: a turn's context is that of the turn that it follows, its answer, and what the chat template writes behind an answer for the new
messages (see `trajectories`). A turn counts only when it is complete, so a session that ends in mid-turn has the turns before.
Its clock stands while it waits for its token budget.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.dataset.columns import TokenIds
from polyreme.experience.records import RewardPart, SampleRecord, ToolCall
from polyreme_trainer.data.tail import Message, Tail, Tools
from polyreme_trainer.orchestrator.environment.protocol import Task
from polyreme_trainer.orchestrator.environment.trajectories import Begun, Trajectories, Trajectory
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout, PartialRollouts
from polyreme_trainer.orchestrator.generation.sampler import Sampler
from polyreme_trainer.orchestrator.generation.token_budget import NextPart, TokenBudget
from polyreme_trainer.orchestrator.prompts.prompt_order import sequence_seed


@dataclass(frozen=True)
class Bounds:
    """The bounds of an episode: turns, tokens of a trajectory with its prompt, and wall-clock seconds."""

    turns: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class SampledTurn:
    """A turn's message without special tokens, the same with them but without the stop token, whether it was cut at its maximum length, the
    tokens before it, int32 [c], and its own, int32 [t], with their log-probabilities, float32 [t]."""

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
        messages: the conversation so far, for display.
        tools: what the chat template declares in the next answer's context; None: nothing.
        deadline: time on the event loop's clock at which the episode's seconds have passed.
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
        self._sampler, self._task, self._bounds = sampler, task, bounds
        self.number, self._temperature, self._budget = number, temperature, None if temperature is not None else budget
        self._trajectories = Trajectories(sampler.template, tail, task.prompt.ids)
        self._over: int = pb.OUTCOME_UNSPECIFIED
        self.messages: list[Message] = []
        self.tools: Tools = None
        self.begin()

    def begin(self) -> None:
        """Starts the episode's clock, when its environment is there."""
        self.deadline = asyncio.get_running_loop().time() + self._bounds.seconds

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
        if asyncio.get_running_loop().time() >= self.deadline:
            return pb.OUTCOME_TIME
        return pb.OUTCOME_LENGTH if (last := self._trajectories.last) and _is_cut(last) else pb.OUTCOME_STOP

    async def answer(
        self,
        messages: Sequence[Message],
        *,
        after: int | None = None,
        max_tokens: int | None = None,
        prompt: str | TokenIds | None = None,
        stop: Sequence[str] = (),
    ) -> SampledTurn:
        """Samples the next turn.

        Args:
            messages: what came since the answer that it follows. Without one they are the whole conversation; none: the row's prompt.
            after: the number of the turn that it follows, from 1; 0: none. None: the last turn, if there is one.
            max_tokens: upper bound of its tokens, in addition to rollout.max_new_tokens.
            prompt: in place of messages and without the chat template, what stands behind the turn that it follows, as text; or the whole
                context, as tokens, of which those of an earlier turn may be the beginning.
            stop: texts that end it, with the token that completes one of them.

        Raises:
            EpisodeOverError: the episode has reached a bound.
            DataError: the chat template refuses the messages, or a token is unknown.
            GenerateError, UnavailableError: see `generate`.
        """
        if self.turns >= self._bounds.turns:
            raise self._end(pb.OUTCOME_TURNS)
        trajectory, context = begun = self._begun(messages, self.turns if after is None else after, prompt)
        shown = messages if prompt is None else self._shown(prompt)
        room = self._bounds.tokens - len(context)
        if room < 1:
            raise self._end(pb.OUTCOME_TOKENS)
        began = time.monotonic()
        try:
            async with asyncio.timeout_at(self.deadline) as limit:
                sample = await self._sample(trajectory, context, min(room, max_tokens or room), limit)
        except TimeoutError:
            if limit.expired():
                raise self._end(pb.OUTCOME_TIME) from None
            raise
        self._end_at(sample, stop)
        self._trajectories.add(begun, sample, time.monotonic() - began)
        return self._told(shown, begun, sample)

    def reward(self, reward: float, calls: Sequence[ToolCall] = ()) -> None:
        """Adds to the reward and the tool calls of the last turn."""
        self._trajectories.reward(reward, calls)

    def trajectories(self, parts: Sequence[RewardPart]) -> list[SampleRecord]:
        """The records of the episode's tokens, after at least one turn. Their score is the sum of all turns' rewards."""
        return self._trajectories.records(parts, trained=self._temperature is None)

    def token_texts(self, turn: SampledTurn) -> list[str]:
        """The text of each token of a turn; see `Template.token_texts`."""
        return self._sampler.template.token_texts(turn.ids.tolist())

    def _end(self, outcome: int) -> EpisodeOverError:
        self._over = outcome
        return EpisodeOverError(outcome)

    def _begun(self, messages: Sequence[Message], after: int, prompt: str | TokenIds | None) -> Begun:
        if isinstance(prompt, TokenIds):
            return self._trajectories.behind_ids(prompt)
        if prompt is not None:
            return self._trajectories.behind_text(after, prompt)
        return self._trajectories.behind_messages(after, messages, self.tools)

    def _shown(self, prompt: str | TokenIds) -> list[Message]:
        """A prompt as a message, for display. Raises DataError for unknown tokens."""
        text = prompt if isinstance(prompt, str) else self._sampler.template.render([prompt])[0]
        return [{"role": "user", "content": text}]

    async def _sample(self, trajectory: Trajectory, context: np.ndarray, room: int, limit: asyncio.Timeout) -> PartialRollout:
        before = (trajectory.number << 32) + len(context) - len(trajectory.prompt)
        group = self._sampler.of_group(self._task.admission, context)
        admission = self._task.admission
        wanted = replace(
            group,
            name=f"{group.name}-{self.number}-{self.turns}",
            count=1,
            max_new=min(group.max_new, room),
            temperature=group.temperature if self._temperature is None else self._temperature,
            seed=partial(_seed, self._sampler.config.seed, admission.index, admission.attempt, self.number, before),
        )
        last = self._trajectories.last
        next_part = None if self._budget is None else partial(self._next_part, self._budget, limit)
        prefer = last.replicas[-1] if last and last.replicas else None
        (sample,) = await self._sampler.sample(wanted, next_part=next_part, prefer=prefer)
        return sample

    async def _next_part(self, budget: TokenBudget, limit: asyncio.Timeout, rollouts: PartialRollouts) -> NextPart:
        """See `TokenBudget`. The wait for it costs the episode no time."""
        now = asyncio.get_running_loop().time
        began, earlier = now(), [span for each in self._trajectories for sample in each.sampled for span in sample.spans]
        limit.reschedule(None)
        part = await budget.next_part(self._task.admission.index, rollouts, earlier)
        self.deadline += now() - began
        limit.reschedule(self.deadline)
        return part

    def _end_at(self, sample: PartialRollout, stop: Sequence[str]) -> None:
        """Drops the tokens behind the one that completes the first of these texts."""

        def has_one(length: int) -> bool:
            (text,) = self._sampler.template.decode([ids[:length]], special=False)
            return any(each in text for each in stop)

        ids = sample.token_ids().tolist()
        if has_one(len(ids)):
            sample.shorten(bisect_left(range(len(ids)), True, key=has_one))
            sample.finish_reason = pb.FINISH_REASON_STOP

    def _told(self, messages: Sequence[Message], begun: Begun, sample: PartialRollout) -> SampledTurn:
        trajectory, context = begun
        template, ids = self._sampler.template, sample.token_ids().tolist()
        (text,) = template.decode([ids], special=False)
        (raw,) = template.decode([ids[:-1] if ids[-1] in template.stop_ids else ids], special=True)
        asked = _behind_answers(messages) if messages else [{"role": "user", "content": self._task.prompt.plain}]
        self.messages += [
            *asked,
            {"role": "assistant", "content": text, "trajectory": trajectory.number, "turn": len(trajectory.turns) - 1},
        ]
        return SampledTurn(text, raw, _is_cut(sample), context, sample.token_ids(), sample.token_logprobs())


def _behind_answers(messages: Sequence[Message]) -> list[Message]:
    """The messages behind the last answer among them: those before it have been shown, or are in the trajectory's prompt."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return list(messages[answers[-1] + 1 :] if answers else messages)


def _is_cut(sample: PartialRollout) -> bool:
    return sample.finish_reason == pb.FINISH_REASON_LENGTH


def _seed(seed: int, group: int, attempt: int, episode: int, before: int, _: int, prefix: int) -> int:
    """The seed of a token with `before` + `prefix` tokens of its trajectory before it; each trajectory counts from a number of its own."""
    return sequence_seed(seed, group, attempt, episode, before + prefix)
