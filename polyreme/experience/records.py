"""Experience as arrays.

A group is the attempts at one task, its **episodes**. An episode of one turn is a sample: a response to the group's prompt. One
of several turns is one or more **trajectories**, which are samples with turns: sampled tokens between tokens of the environment.

Invariant: records never change, and every group that enters or leaves the log is consistent (see `record_codec`).
"""

import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polyreme.api.v1.experience_pb2 import Outcome

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
UInt8 = NDArray[np.uint8]


class RewardPart(NamedTuple):
    """A named component of a score: a reward or a sub-part (REWARD/NAME), with its value, raw and times the reward's weight."""

    name: str
    raw: float
    weighted: float
    plugin_version: str = ""


class RewardCall(NamedTuple):
    """One call of a reward server that included a sample: the server's id, "ok" or what failed, and its wall-clock seconds."""

    server: str
    status: str
    message: str = ""
    seconds: float = 0.0


class ToolCall(NamedTuple):
    """A tool call: its arguments as JSON text, result cut for display, wall-clock seconds, and why it failed ("": it did not)."""

    name: str
    arguments: str
    result: str = ""
    seconds: float = 0.0
    error: str = ""


class Turn(NamedTuple):
    """One message that the policy sampled: tokens [start, end) of its trajectory.

    Its reward is a part of the score, like token rewards; its seconds are the wall-clock time of sampling.
    """

    start: int
    end: int
    reward: float = 0.0
    seconds: float = 0.0
    tool_calls: tuple[ToolCall, ...] = ()


class EpisodeRecord(NamedTuple):
    """One attempt at a task: its outcome (pb.OUTCOME_...), its messages and its seconds in the environment.

    The messages are JSON text, for display: a list of objects with `role` and `content`. One that the policy sampled also has
    `trajectory`, the place among the episode's trajectories, and `turn`, the place among the turns there. A request that was
    withdrawn before its answer was complete has `withdrawn`, and so has what was sampled of that, which is in no trajectory.
    """

    outcome: int
    messages: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class SampleRecord:
    """One trajectory: the t tokens after a prompt. Without turns, the policy sampled all of them.

    Attributes:
        token_ids: int32 [t], the tokens with the stop tokens: the policy's, and between the turns the environment's.
        logprobs: float32 [t], of each token under the policy that sampled it, at the sampling temperature; 0 outside the turns.
        loss_mask: uint8 [t], 1 if the policy sampled the token and it is trained on.
        finish_reason: pb.FINISH_REASON_STOP or pb.FINISH_REASON_LENGTH, of its last turn.
        spans: (version, start, end) of the policy versions, in order, covering exactly the sampled tokens.
        score: the reward, finite. Of an episode, the same at each of its trajectories; so are its parts.
        token_rewards: float32 [t], the part of the score that rewards assigned to single tokens, or None.
        teacher_logprobs: float32 [t], of each token under the teacher of a distillation, or None.
        parts: the score is the sum of their weighted values without sub-parts.
        text: the response without special tokens, for display.
        routes: uint8 [t, r], the experts that the replica chose for the position before each token, layer by layer, in r bytes:
            each a uint8, or a uint16 (little-endian) where a layer has more than 256. Layers without experts have none. Outside
            of the turns they are 0 and mean nothing. None: not reported.
        replicas: ids of the replicas that sampled its tokens, in order.
        calls: the newest calls of reward servers for it.
        prompt_ids: int32 [p], its prompt where it is not the group's, else None.
        turns: in order, the first one from 0 on, the last one up to t. None: a single response.
        episode: the position of its episode in the group's episodes; 0 in a group without.
    """

    token_ids: Int32
    logprobs: Float32
    loss_mask: UInt8
    finish_reason: int
    spans: list[tuple[int, int, int]]
    score: float
    parts: list[RewardPart] = field(default_factory=list)
    text: str = ""
    token_rewards: Float32 | None = None
    teacher_logprobs: Float32 | None = None
    routes: UInt8 | None = None
    replicas: tuple[str, ...] = ()
    calls: tuple[RewardCall, ...] = ()
    prompt_ids: Int32 | None = None
    turns: tuple[Turn, ...] = ()
    episode: int = 0

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(turn.end - turn.start for turn in self.turns) if self.turns else len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        return min(version for version, _, _ in self.spans)


@dataclass(frozen=True)
class GroupRecord:
    """The samples of one prompt: one for each attempt at its task, or the trajectories of its episodes.

    Attributes:
        index: index of the group in the run, which determines its prompt, order and seeds.
        attempt: number of the attempt, from 1.
        prompt_ids: int32 [p], the templated prompt.
        samples: at least one, in the order of the episodes.
        prompt: the prompt as text, for display.
        label: the reference answer; may be empty.
        generate_seconds, score_seconds: wall-clock time of generation, and of scoring with the requests to a teacher.
        began: Unix time at which the attempt began; 0 when unknown.
        episodes: each has at least one sample. None: each sample is an episode of its own.
    """

    index: int
    attempt: int
    prompt_ids: Int32
    samples: list[SampleRecord]
    prompt: str = ""
    label: str = ""
    generate_seconds: float = 0.0
    score_seconds: float = 0.0
    began: float = 0.0
    episodes: list[EpisodeRecord] = field(default_factory=list)

    @property
    def oldest_version(self) -> int:
        return min(sample.oldest_version for sample in self.samples)

    def prompt_of(self, sample: SampleRecord) -> Int32:
        """int32 [p], the prompt of one of the samples."""
        return self.prompt_ids if sample.prompt_ids is None else sample.prompt_ids

    @property
    def episode_of(self) -> list[int]:
        """The number of each sample's episode within the group, from 0, not decreasing."""
        return [sample.episode for sample in self.samples] if self.episodes else list(range(len(self.samples)))

    @cached_property
    def sampled(self) -> list[SampleRecord]:
        """The samples that are trained on: not a greedy baseline, which has no trained token. All, where none has one."""
        return [sample for sample in self.samples if sample.loss_mask.any()] or self.samples

    @cached_property
    def scored(self) -> list[SampleRecord]:
        """The first of `sampled` of each episode. Scores are counted over these, so that an episode counts once."""
        firsts = {sample.episode: sample for sample in reversed(self.sampled)}
        return list(firsts.values())[::-1] if self.episodes else self.sampled

    @property
    def mean_reward(self) -> float:
        return math.fsum(sample.score for sample in self.scored) / len(self.scored)


def episode_fields(group: GroupRecord, sample: SampleRecord) -> dict[str, object]:
    """The fields of a trajectory's line of JSON: its episode, why that ended, its turns, and the conversation.

    With several trajectories, `trajectories` are the positions of its samples, and `trajectory` is this one's place among them.
    """
    episode = group.episodes[sample.episode]
    positions = [position for position, other in enumerate(group.samples) if other.episode == sample.episode]
    own = next(place for place, position in enumerate(positions) if group.samples[position] is sample)
    return {
        "episode": sample.episode,
        **({"trajectories": positions, "trajectory": own} if len(positions) > 1 else {}),
        "outcome": Outcome.Name(episode.outcome).removeprefix("OUTCOME_").lower(),
        "environment_seconds": round(episode.seconds, 5),
        "turns": [{**turn._asdict(), "tool_calls": [call._asdict() for call in turn.tool_calls]} for turn in sample.turns],
        "messages": json.loads(episode.messages) if episode.messages else [],
    }
