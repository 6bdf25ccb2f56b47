"""One episode's policy: it samples an answer to messages, and keeps the exact tokens of the conversation.

Invariant: the tokens that the learner trains on are those that were sampled, in the context in which they were sampled. Each turn's context is
the previous one, its answer, and what the chat template writes behind an answer for the new messages; nothing is encoded twice. A turn
counts only when it is complete, so a session that ends in mid-turn has the turns before.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    """A turn's message without special tokens, the same with them but without the stop token, and whether it was cut at its maximum length."""

    text: str
    raw: str
    is_cut: bool


class EpisodeOverError(Exception):
    """The episode has reached a bound. `outcome` is one of pb.OUTCOME_TURNS, pb.OUTCOME_TOKENS and pb.OUTCOME_TIME."""

    def __init__(self, outcome: int) -> None:
        super().__init__(pb.Outcome.Name(outcome))
        self.outcome = outcome


class EpisodeSession:
    """The policy in one episode of a task.

    Args:
        number: the number of the episode within its group, which determines its seeds.
        greedy: whether it samples greedily and is not trained on.

    Attributes:
        messages: the conversation so far, for display.
        tools: what the chat template declares, to be set before the first answer; None: nothing.
        deadline: time on the event loop's clock at which the episode's seconds have passed.
    """

    def __init__(self, sampler: Sampler, tail: Tail, task: Task, number: int, bounds: Bounds, *, greedy: bool = False) -> None:
        self._sampler, self._tail, self._task, self._bounds = sampler, tail, task, bounds
        self.number, self._greedy = number, greedy
        self._prompt = task.prompt.ids
        self._context = np.empty(0, np.int32)
        self._turns: list[Turn] = []
        self._sampled: list[PartialRollout] = []
        self.messages: list[Message] = []
        self.tools: Tools = None
        self.begin()

    def begin(self) -> None:
        """Starts the episode's clock, when its environment is there."""
        self.deadline = asyncio.get_running_loop().time() + self._bounds.seconds

    @property
    def turns(self) -> int:
        """The number of complete turns."""
        return len(self._turns)

    @property
    def score(self) -> float:
        """The sum of the turns' rewards."""
        return math.fsum(turn.reward for turn in self._turns)

    @property
    def outcome(self) -> int:
        """The outcome of the episode if it ends now."""
        return pb.OUTCOME_LENGTH if self._sampled and _is_cut(self._sampled[-1]) else pb.OUTCOME_STOP

    async def answer(self, messages: Sequence[Message]) -> SampledTurn:
        """Samples the next turn.

        Args:
            messages: what came since the last answer. Before the first one they are the whole conversation; none: the row's prompt.

        Raises:
            EpisodeOverError: the episode has reached a bound.
            DataError: the chat template refuses the messages.
            GenerateError, UnavailableError: see `generate`.
        """
        if self.turns >= self._bounds.turns:
            raise EpisodeOverError(pb.OUTCOME_TURNS)
        context = self._continued(messages)
        room = self._bounds.tokens - len(context)
        if room < 1:
            raise EpisodeOverError(pb.OUTCOME_TOKENS)
        began = time.monotonic()
        try:
            async with asyncio.timeout_at(self.deadline) as limit:
                sample = await self._sample(context, room)
        except TimeoutError:
            if limit.expired():
                raise EpisodeOverError(pb.OUTCOME_TIME) from None
            raise
        return self._add(messages, context, sample, time.monotonic() - began)

    def reward(self, reward: float, calls: Sequence[ToolCall] = ()) -> None:
        """Adds to the reward and the tool calls of the last turn."""
        last = self._turns[-1]
        self._turns[-1] = last._replace(reward=last.reward + reward, tool_calls=(*last.tool_calls, *calls))

    def trajectory(self, parts: Sequence[RewardPart]) -> SampleRecord:
        """The record of the episode's tokens, after at least one turn. Its score is the sum of the turns' rewards."""
        start = len(self._prompt)
        ids = self._context[start:]
        logprobs, mask = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.uint8)
        width = max((sample.route_bytes for sample in self._sampled), default=0)
        routes = np.zeros((len(ids), width), np.uint8) if width else None
        spans: list[Span] = []
        for turn, sample in zip(self._turns, self._sampled, strict=True):
            logprobs[turn.start : turn.end] = sample.token_logprobs()
            mask[turn.start : turn.end] = not self._greedy
            spans += [(version, turn.start + first, turn.start + last) for version, first, last in sample.spans]
            if routes is not None and (of_turn := sample.token_routes()) is not None:
                routes[turn.start : turn.end] = of_turn
        return SampleRecord(
            token_ids=ids,
            logprobs=logprobs,
            loss_mask=mask,
            finish_reason=self._sampled[-1].finish_reason,
            spans=merged(spans),
            score=self.score,
            parts=list(parts),
            text=self._sampler.template.decode([ids.tolist()], special=False)[0],
            routes=routes,
            replicas=tuple(dict.fromkeys(name for sample in self._sampled for name in sample.replicas)),
            prompt_ids=None if np.array_equal(self._prompt, self._task.prompt.ids) else self._prompt,
            turns=tuple(self._turns),
        )

    def _continued(self, messages: Sequence[Message]) -> np.ndarray:
        """The context of the next turn, int32."""
        if self._sampled:
            return np.concatenate([self._context, self._tail.after(self._context, messages, self.tools)])
        return self._tail.begin(messages, self.tools) if messages else self._prompt

    async def _sample(self, context: np.ndarray, room: int) -> PartialRollout:
        before = len(context) - len(self._prompt) if self._sampled else 0
        group = self._sampler.of_group(self._task.admission, context)
        admission = self._task.admission
        wanted = replace(
            group,
            name=f"{group.name}-{self.number}-{self.turns}",
            count=1,
            max_new=min(group.max_new, room),
            temperature=0.0 if self._greedy else group.temperature,
            seed=partial(_seed, self._sampler.config.seed, admission.index, admission.attempt, self.number, before),
        )
        used = self._sampled[-1].replicas if self._sampled else []
        (sample,) = await self._sampler.sample(wanted, prefer=used[-1] if used else None)
        return sample

    def _add(self, messages: Sequence[Message], context: np.ndarray, sample: PartialRollout, seconds: float) -> SampledTurn:
        if not self._sampled:
            self._prompt = context
        start = len(context) - len(self._prompt)
        self._context = np.concatenate([context, sample.token_ids()])
        self._turns.append(Turn(start, start + sample.length, seconds=seconds))
        self._sampled.append(sample)
        template, ids = self._sampler.template, sample.token_ids().tolist()
        (text,) = template.decode([ids], special=False)
        (raw,) = template.decode([ids[:-1] if ids[-1] in template.stop_ids else ids], special=True)
        asked = messages or [{"role": "user", "content": self._task.prompt.plain}]
        self.messages += [*asked, {"role": "assistant", "content": text}]
        return SampledTurn(text, raw, _is_cut(sample))


def _is_cut(sample: PartialRollout) -> bool:
    return sample.finish_reason == pb.FINISH_REASON_LENGTH


def _seed(seed: int, group: int, attempt: int, episode: int, before: int, _: int, prefix: int) -> int:
    """The seed of a token with `before` + `prefix` tokens of its trajectory before it."""
    return sequence_seed(seed, group, attempt, episode, before + prefix)
