"""The exact tokens of an episode: its trajectories, and the turns that the policy sampled in them.

Invariant: tokens that were sampled are never encoded again, and each of them is in one trajectory, in the context in which it was
sampled. A turn that follows none, or another one than the last of its trajectory, begins a trajectory whose prompt is its
context; so does one that follows the last turn of a trajectory which another turn continues at the same time. What belongs to
what, and the order of the trajectories, depend on the order in which the turns begin, not on that in which they end.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from polyreme.api.v1.environment_pb2 import SessionTurn
from polyreme.api.v1.experience_pb2 import FinishReason, VersionSpan
from polyreme.dataset.chat import Message
from polyreme.dataset.columns import TokenIds
from polyreme.errors import DataError
from polyreme.experience.records import RewardPart, SampleRecord, ToolCall, Turn
from polyreme_trainer.data.tail import Tail, Tools
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout, Span, merged

_LARGEST = float(np.finfo(np.float32).max)
_BUG = "Report this as a bug; the session cannot be continued."


@dataclass
class Trajectory:
    """Tokens that only grow: the prompt, and the context up to the end of the last turn, both int32; the turns, and their
    samples; and whether a turn is being sampled behind them."""

    number: int
    prompt: np.ndarray
    context: np.ndarray
    turns: list[Turn] = field(default_factory=list)
    sampled: list[PartialRollout] = field(default_factory=list)
    is_growing: bool = False


Begun = tuple[Trajectory, np.ndarray]
"""What a turn belongs to, which may be new, and its context, int32."""


class Trajectories:
    """The trajectories of an episode. Turns have numbers from 1, in the order in which they begin; number 0 is none.

    Args:
        prompt: int32 [p], the prompt of the episode's row.

    Attributes:
        newest: the highest number of a complete turn; 0: there is none.
    """

    def __init__(self, template: Template, tail: Tail, prompt: np.ndarray) -> None:
        self._template, self._tail, self._prompt = template, tail, prompt
        self._all: list[Trajectory] = []
        self._turns: dict[int, tuple[Trajectory, int]] = {}
        self.newest = 0

    def __iter__(self) -> Iterator[Trajectory]:
        """Those that have a turn."""
        return (each for each in self._all if each.turns)

    def __contains__(self, number: int) -> bool:
        """Whether a turn of this number is complete."""
        return number in self._turns

    @property
    def turns(self) -> int:
        """How many turns are complete."""
        return len(self._turns)

    @property
    def score(self) -> float:
        """The sum of the turns' rewards."""
        return math.fsum(turn.reward for each in self for turn in each.turns)

    @property
    def last(self) -> PartialRollout | None:
        """The sample of the newest turn."""
        if not self._turns:
            return None
        trajectory, place = self._turns[self.newest]
        return trajectory.sampled[place]

    def behind_messages(self, after: int, messages: Sequence[Message], tools: Tools) -> Begun:
        """A turn behind messages that follow a turn, or are the whole conversation; none: the row's prompt. Raises DataError."""
        if not after:
            return self._behind(0, self._tail.begin(messages, tools) if messages else self._prompt)
        exact = self._exact(after)
        return self._behind(after, np.concatenate([exact, self._tail.after(exact, messages, tools)]))

    def behind_text(self, after: int, text: str) -> Begun:
        """A turn behind a text after a turn. Where the text lacks the stop token that ended it, a new trajectory goes on."""
        if not after:
            return self._behind(0, self._template.encode_prompts([text])[0])
        exact, behind = self._exact(after), self._template.encode([text])[0]
        if exact[-1] not in self._template.stop_ids:
            return self._behind(after, np.concatenate([exact, behind]))
        is_repeated = len(behind) and behind[0] == exact[-1]
        return self._behind(after if is_repeated else 0, np.concatenate([exact[:-1], behind]))

    def behind_ids(self, ids: TokenIds) -> Begun:
        """A turn with this context, which follows the longest turn whose tokens are its beginning."""
        context = np.array(ids, np.int32)
        ends = {number: self._exact(number) for number in sorted(self._turns)}
        begins = [number for number, exact in ends.items() if np.array_equal(exact, context[: len(exact)])]
        return self._behind(max(begins, key=lambda number: len(ends[number]), default=0), context)

    @contextmanager
    def growing(self, trajectory: Trajectory) -> Iterator[None]:
        """Keeps the end of a trajectory for a turn, while that is sampled."""
        if trajectory.number == len(self._all):
            self._all.append(trajectory)
        trajectory.is_growing = True
        try:
            yield
        finally:
            trajectory.is_growing = False

    def add(self, number: int, begun: Begun, sample: PartialRollout, seconds: float) -> Turn:
        """Adds a turn that was sampled."""
        trajectory, context = begun
        self._turns[number] = trajectory, len(trajectory.turns)
        self.newest = max(self.newest, number)
        start = len(context) - len(trajectory.prompt)
        turn = Turn(start, start + sample.length, seconds=seconds)
        trajectory.context = np.concatenate([context, sample.token_ids()])
        trajectory.turns.append(turn)
        trajectory.sampled.append(sample)
        return turn

    def remove(self, number: int) -> bool:
        """Whether there is a complete turn of this number that is the last of its trajectory, which it leaves then."""
        trajectory, place = self._turns.get(number, (None, 0))
        if trajectory is None or trajectory.is_growing or place < len(trajectory.turns) - 1:
            return False
        first = trajectory.turns[place - 1].end if place else 0
        trajectory.context = trajectory.context[: len(trajectory.prompt) + first]
        del trajectory.turns[place], trajectory.sampled[place], self._turns[number]
        self.newest = max(self._turns, default=0)
        return True

    def kept(self) -> SessionTurn:
        """The newest turn, for `restore`."""
        trajectory, place = self._turns[self.newest]
        turn, sample, prompt = trajectory.turns[place], trajectory.sampled[place], len(trajectory.prompt)
        first = prompt + trajectory.turns[place - 1].end if place else 0
        return SessionTurn(
            trajectory=trajectory.number,
            context=trajectory.context[first : prompt + turn.start].astype("<i4").tobytes(),
            ids=bytes(sample.ids),
            logprobs=bytes(sample.logprobs),
            routes=bytes(sample.routes),
            spans=[VersionSpan(version=version, start=start, end=end) for version, start, end in sample.spans],
            finish_reason=FinishReason.Name(sample.finish_reason),
            replicas=sample.replicas,
            seconds=turn.seconds,
        )

    def restore(self, number: int, kept: SessionTurn) -> None:
        """Adds a turn that `kept` told, after those before it. Raises DataError when it does not follow them."""
        if kept.trajectory > len(self._all):
            raise DataError(
                f"a turn of one of {len(self._all)} trajectories, or of a new one", f"trajectory {kept.trajectory}", _BUG
            )
        new, spans = np.frombuffer(kept.context, "<i4"), [(span.version, span.start, span.end) for span in kept.spans]
        if kept.trajectory == len(self._all):
            self._all.append(Trajectory(kept.trajectory, new, new))
        found = self._all[kept.trajectory]
        parts = bytearray(kept.ids), bytearray(kept.logprobs), bytearray(kept.routes)
        sample = PartialRollout(0, *parts, spans, kept.finish_reason, replicas=list(kept.replicas))
        self.add(number, (found, np.concatenate([found.context, new]) if found.turns else new), sample, kept.seconds)

    def reward(self, number: int, reward: float, calls: Sequence[ToolCall]) -> None:
        """Adds to the reward and the tool calls of a turn. Raises EpisodeError for a number that the learner cannot have."""
        trajectory, place = self._turns[number]
        last = trajectory.turns[place]
        trajectory.turns[place] = last._replace(reward=last.reward + reward, tool_calls=(*last.tool_calls, *calls))
        if not abs(last.reward + reward) <= _LARGEST or abs(self.score) > _LARGEST:
            raise EpisodeError(f"expected finite rewards, at most the maximum of float32; found {reward} for turn {number}")

    def records(self, parts: Sequence[RewardPart], *, trained: bool) -> list[SampleRecord]:
        """The records of all tokens, after at least one turn. Their score is the sum of all turns' rewards."""
        score = self.score
        return [self._record(each, score, parts, trained) for each in self]

    def _record(self, trajectory: Trajectory, score: float, parts: Sequence[RewardPart], trained: bool) -> SampleRecord:
        ids = trajectory.context[len(trajectory.prompt) :]
        logprobs, mask = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.uint8)
        width = max(sample.route_bytes for sample in trajectory.sampled)
        routes = np.zeros((len(ids), width), np.uint8) if width else None
        spans: list[Span] = []
        for turn, sample in zip(trajectory.turns, trajectory.sampled, strict=True):
            logprobs[turn.start : turn.end] = sample.token_logprobs()
            mask[turn.start : turn.end] = trained
            spans += [(version, turn.start + first, turn.start + last) for version, first, last in sample.spans]
            if routes is not None and (of_turn := sample.token_routes()) is not None:
                routes[turn.start : turn.end] = of_turn
        return SampleRecord(
            token_ids=ids,
            logprobs=logprobs,
            loss_mask=mask,
            finish_reason=trajectory.sampled[-1].finish_reason,
            spans=merged(spans),
            score=score,
            parts=list(parts),
            text=self._template.decode([ids.tolist()], special=False)[0],
            routes=routes,
            replicas=tuple(dict.fromkeys(name for sample in trajectory.sampled for name in sample.replicas)),
            prompt_ids=None if np.array_equal(trajectory.prompt, self._prompt) else trajectory.prompt,
            turns=tuple(trajectory.turns),
        )

    def _exact(self, number: int) -> np.ndarray:
        """The tokens up to the end of a turn, int32."""
        trajectory, place = self._turns[number]
        return trajectory.context[: len(trajectory.prompt) + trajectory.turns[place].end]

    def _behind(self, after: int, context: np.ndarray) -> Begun:
        """A turn with this context, which begins with the tokens of turn `after`."""
        trajectory, place = self._turns[after] if after else (None, 0)
        if trajectory is not None and place == len(trajectory.turns) - 1 and not trajectory.is_growing:
            return trajectory, context
        return Trajectory(len(self._all), context, context), context  # the turns before are those of another one
