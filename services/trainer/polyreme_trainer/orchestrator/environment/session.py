"""One episode's policy: it samples an answer to messages, and keeps the exact tokens of the conversation.

Invariant: the tokens that the learner trains on are those that were sampled, in the context in which they were sampled, each in one
trajectory. A turn's context is that of the turn that it follows, its answer, and what the chat template writes behind an answer for the new
messages; nothing is encoded twice. A turn that follows none, or another one than the last of its trajectory, begins a trajectory. A turn
counts only when it is complete, so a session that ends in mid-turn has the turns before.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.experience.records import RewardPart, SampleRecord, ToolCall, Turn
from polyreme_trainer.data.tail import Message, Tail, Tools
from polyreme_trainer.orchestrator.environment.protocol import Task
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout, Span, merged
from polyreme_trainer.orchestrator.generation.sampler import Sampler
from polyreme_trainer.orchestrator.prompts.prompt_order import sequence_seed


@dataclass(frozen=True)
class Bounds:
    """The bounds of an episode: turns, tokens of a trajectory with its prompt, and wall-clock seconds."""

    turns: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class SampledTurn:
    """A turn's message without special tokens, the same with them but without the stop token, whether it was cut at its maximum length, and the
    tokens before it and of it."""

    text: str
    raw: str
    is_cut: bool
    context_tokens: int
    tokens: int


class EpisodeOverError(Exception):
    """The episode has reached a bound. `outcome` is one of pb.OUTCOME_TURNS, pb.OUTCOME_TOKENS and pb.OUTCOME_TIME."""

    def __init__(self, outcome: int) -> None:
        super().__init__(pb.Outcome.Name(outcome))
        self.outcome = outcome


@dataclass
class _Trajectory:
    """Tokens that only grow: the prompt, and the context up to the end of the last turn, both int32; the turns, and their samples."""

    number: int
    prompt: np.ndarray
    context: np.ndarray
    turns: list[Turn] = field(default_factory=list)
    sampled: list[PartialRollout] = field(default_factory=list)


class EpisodeSession:
    """The policy in one episode of a task.

    Args:
        number: the number of the episode within its group, which determines its seeds.
        temperature: of an episode that is not trained on, 0 for a greedy one; None: the run's.

    Attributes:
        messages: the conversation so far, for display.
        tools: what the chat template declares in the next answer's context; None: nothing.
        deadline: time on the event loop's clock at which the episode's seconds have passed.
    """

    def __init__(
        self, sampler: Sampler, tail: Tail, task: Task, number: int, bounds: Bounds, temperature: float | None = None
    ) -> None:
        self._sampler, self._tail, self._task, self._bounds = sampler, tail, task, bounds
        self.number, self._temperature = number, temperature
        self._trajectories: list[_Trajectory] = []
        self._turns: list[tuple[_Trajectory, int]] = []  # in the order of sampling: the trajectory, and the place among its turns
        self._last: SampledTurn | None = None
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
        return len(self._turns)

    @property
    def last_turn(self) -> SampledTurn:
        """The last complete turn. There is one."""
        assert self._last is not None, "the episode has a turn"
        return self._last

    @property
    def score(self) -> float:
        """The sum of the turns' rewards."""
        return math.fsum(turn.reward for each in self._trajectories for turn in each.turns)

    @property
    def outcome(self) -> int:
        """The outcome of the episode if it ends now."""
        if self._over:
            return self._over
        if asyncio.get_running_loop().time() >= self.deadline:
            return pb.OUTCOME_TIME
        return pb.OUTCOME_LENGTH if (last := self._last_sample()) and _is_cut(last) else pb.OUTCOME_STOP

    async def answer(
        self, messages: Sequence[Message], *, after: int | None = None, max_tokens: int | None = None
    ) -> SampledTurn:
        """Samples the next turn.

        Args:
            messages: what came since the answer that it follows. Without one they are the whole conversation; none: the row's prompt.
            after: the number of the turn that it follows, from 1; 0: none. None: the last turn, if there is one.
            max_tokens: upper bound of its tokens, in addition to rollout.max_new_tokens.

        Raises:
            EpisodeOverError: the episode has reached a bound.
            DataError: the chat template refuses the messages.
            GenerateError, UnavailableError: see `generate`.
        """
        if self.turns >= self._bounds.turns:
            raise self._end(pb.OUTCOME_TURNS)
        trajectory, context = self._continued(messages, self.turns if after is None else after)
        room = self._bounds.tokens - len(context)
        if room < 1:
            raise self._end(pb.OUTCOME_TOKENS)
        began = time.monotonic()
        try:
            async with asyncio.timeout_at(self.deadline) as limit:
                sample = await self._sample(trajectory, context, min(room, max_tokens or room))
        except TimeoutError:
            if limit.expired():
                raise self._end(pb.OUTCOME_TIME) from None
            raise
        return self._add(messages, trajectory, context, sample, time.monotonic() - began)

    def reward(self, reward: float, calls: Sequence[ToolCall] = ()) -> None:
        """Adds to the reward and the tool calls of the last turn."""
        trajectory, place = self._turns[-1]
        last = trajectory.turns[place]
        trajectory.turns[place] = last._replace(reward=last.reward + reward, tool_calls=(*last.tool_calls, *calls))

    def trajectories(self, parts: Sequence[RewardPart]) -> list[SampleRecord]:
        """The records of the episode's tokens, after at least one turn. Their score is the sum of all turns' rewards."""
        return [self._record(each, parts) for each in self._trajectories]

    def _record(self, trajectory: _Trajectory, parts: Sequence[RewardPart]) -> SampleRecord:
        ids = trajectory.context[len(trajectory.prompt) :]
        logprobs, mask = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.uint8)
        width = max(sample.route_bytes for sample in trajectory.sampled)
        routes = np.zeros((len(ids), width), np.uint8) if width else None
        spans: list[Span] = []
        for turn, sample in zip(trajectory.turns, trajectory.sampled, strict=True):
            logprobs[turn.start : turn.end] = sample.token_logprobs()
            mask[turn.start : turn.end] = self._temperature is None
            spans += [(version, turn.start + first, turn.start + last) for version, first, last in sample.spans]
            if routes is not None and (of_turn := sample.token_routes()) is not None:
                routes[turn.start : turn.end] = of_turn
        return SampleRecord(
            token_ids=ids,
            logprobs=logprobs,
            loss_mask=mask,
            finish_reason=trajectory.sampled[-1].finish_reason,
            spans=merged(spans),
            score=self.score,
            parts=list(parts),
            text=self._sampler.template.decode([ids.tolist()], special=False)[0],
            routes=routes,
            replicas=tuple(dict.fromkeys(name for sample in trajectory.sampled for name in sample.replicas)),
            prompt_ids=None if np.array_equal(trajectory.prompt, self._task.prompt.ids) else trajectory.prompt,
            turns=tuple(trajectory.turns),
        )

    def _end(self, outcome: int) -> EpisodeOverError:
        self._over = outcome
        return EpisodeOverError(outcome)

    def _last_sample(self) -> PartialRollout | None:
        if not self._turns:
            return None
        trajectory, place = self._turns[-1]
        return trajectory.sampled[place]

    def _continued(self, messages: Sequence[Message], after: int) -> tuple[_Trajectory, np.ndarray]:
        """The trajectory of the next turn, which may be a new one, and the turn's context, int32."""
        if not after:
            prompt = self._tail.begin(messages, self.tools) if messages else self._task.prompt.ids
            return _Trajectory(len(self._trajectories), prompt, prompt), prompt
        trajectory, place = self._turns[after - 1]
        exact = trajectory.context[: len(trajectory.prompt) + trajectory.turns[place].end]
        context = np.concatenate([exact, self._tail.after(exact, messages, self.tools)])
        if place == len(trajectory.turns) - 1:
            return trajectory, context
        return _Trajectory(len(self._trajectories), context, context), context  # the turns before are those of the other one

    async def _sample(self, trajectory: _Trajectory, context: np.ndarray, room: int) -> PartialRollout:
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
        last = self._last_sample()
        (sample,) = await self._sampler.sample(wanted, prefer=last.replicas[-1] if last and last.replicas else None)
        return sample

    def _add(
        self, messages: Sequence[Message], trajectory: _Trajectory, context: np.ndarray, sample: PartialRollout, seconds: float
    ) -> SampledTurn:
        if not trajectory.turns:
            self._trajectories.append(trajectory)
        self._turns.append((trajectory, len(trajectory.turns)))
        start = len(context) - len(trajectory.prompt)
        trajectory.context = np.concatenate([context, sample.token_ids()])
        trajectory.turns.append(Turn(start, start + sample.length, seconds=seconds))
        trajectory.sampled.append(sample)
        template, ids = self._sampler.template, sample.token_ids().tolist()
        (text,) = template.decode([ids], special=False)
        (raw,) = template.decode([ids[:-1] if ids[-1] in template.stop_ids else ids], special=True)
        asked = _behind_answers(messages) if messages else [{"role": "user", "content": self._task.prompt.plain}]
        self.messages += [
            *asked,
            {"role": "assistant", "content": text, "trajectory": trajectory.number, "turn": len(trajectory.turns) - 1},
        ]
        self._last = SampledTurn(text, raw, _is_cut(sample), len(context), sample.length)
        return self._last


def _behind_answers(messages: Sequence[Message]) -> list[Message]:
    """The messages behind the last answer among them: those before it have been shown, or are in the trajectory's prompt."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return list(messages[answers[-1] + 1 :] if answers else messages)


def _is_cut(sample: PartialRollout) -> bool:
    return sample.finish_reason == pb.FINISH_REASON_LENGTH


def _seed(seed: int, group: int, attempt: int, episode: int, before: int, _: int, prefix: int) -> int:
    """The seed of a token with `before` + `prefix` tokens of its trajectory before it; each trajectory counts from a number of its own."""
    return sequence_seed(seed, group, attempt, episode, before + prefix)
