"""Groups of episodes with random turns, masks and rewards, and what they mean in plain Python: which tokens are trained, and their rewards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.experience.records import EpisodeRecord, GroupRecord, RewardPart, SampleRecord, Turn

VOCABULARY = 9


def trajectory(random: np.random.Generator, turns: int, score: float, masked: float = 0.0, version: int = 1) -> SampleRecord:
    """A trajectory of random tokens. The environment writes up to three tokens between turns; it may write none.

    Args:
        score: its turns' rewards are parts of it.
        masked: the probability that a sampled token is not trained on.
    """
    written, ranges, at = [], [], 0
    for number in range(turns):
        at += int(random.integers(0, 4)) if number else 0
        ranges.append((at, at + int(random.integers(1, 4))))
        at = ranges[-1][1]
    sampled = np.zeros(at, dtype=bool)
    for start, end in ranges:
        sampled[start:end] = True
        written.append(Turn(start, end, float(random.normal())))
    trained = sampled & (random.random(at) >= masked)
    part = 0.25 * score
    return SampleRecord(
        token_ids=random.integers(0, VOCABULARY, at).astype(np.int32),
        logprobs=np.where(sampled, -random.exponential(1.0, at), 0.0).astype(np.float32),
        loss_mask=trained.astype(np.uint8),
        finish_reason=pb.FINISH_REASON_STOP,
        spans=[(version, start, end) for start, end in ranges],
        score=score,
        parts=[RewardPart("a", part, part), RewardPart("b", score - part, score - part)],
        turns=tuple(written),
    )


def episode_group(seed: int, index: int = 0, episodes: int = 4, turns: int = 4, masked: float = 0.0) -> GroupRecord:
    """A group of episodes of one trajectory each, of up to `turns` turns; some end at a bound."""
    random = np.random.default_rng([seed, index])
    scores = random.normal(size=episodes).tolist()
    samples = [
        replace(trajectory(random, int(random.integers(1, turns + 1)), score, masked), episode=number)
        for number, score in enumerate(scores)
    ]
    outcomes = random.choice([pb.OUTCOME_STOP, pb.OUTCOME_TURNS], episodes).tolist()
    prompt = random.integers(0, VOCABULARY, 3).astype(np.int32)
    return GroupRecord(index, 1, prompt, samples, episodes=[EpisodeRecord(outcome) for outcome in outcomes])


def branched(group: GroupRecord) -> GroupRecord:
    """The group with each episode of several turns as two trajectories: the second one begins, in its own prompt, with all of the first."""
    samples = []
    for sample in group.samples:
        half = len(sample.turns) // 2
        if not half:
            samples.append(sample)
            continue
        end, start = sample.turns[half - 1].end, sample.turns[half].start
        prompt = np.concatenate([group.prompt_of(sample), sample.token_ids[:start]])
        samples += [_part(sample, 0, end), replace(_part(sample, start, len(sample)), prompt_ids=prompt)]
    return replace(group, samples=samples)


def _part(sample: SampleRecord, start: int, end: int) -> SampleRecord:
    def moved(ranges: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        return [(value, first - start, last - start) for value, first, last in ranges if start <= first and last <= end]

    turns = [turn._replace(start=turn.start - start, end=turn.end - start) for turn in sample.turns if start <= turn.start < end]
    arrays = {name: getattr(sample, name)[start:end] for name in ("token_ids", "logprobs", "loss_mask")}
    return replace(sample, **arrays, spans=moved(sample.spans), turns=tuple(turns))


def with_turns(group: GroupRecord, seed: int) -> GroupRecord:
    """A group of single responses as one of episodes, each response cut into two turns where it has two tokens."""
    random = np.random.default_rng(seed)
    samples = []
    for number, sample in enumerate(group.samples):
        cuts = [0, *([int(random.integers(1, len(sample)))] if len(sample) > 1 else []), len(sample)]
        turns = tuple(Turn(start, end) for start, end in pairwise(cuts))
        samples.append(replace(sample, turns=turns, episode=number))
    ends = [pb.OUTCOME_LENGTH if s.finish_reason == pb.FINISH_REASON_LENGTH else pb.OUTCOME_STOP for s in group.samples]
    return replace(group, samples=samples, episodes=[EpisodeRecord(outcome) for outcome in ends])


def single_group(seed: int, index: int = 0, samples: int = 4, masked: float = 0.0) -> GroupRecord:
    """A group of single responses, some of them cut off."""
    random = np.random.default_rng([seed, index])
    made = [trajectory(random, 1, float(random.normal()), masked) for _ in range(samples)]
    ends = random.choice([pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH], samples).tolist()
    return GroupRecord(
        index,
        1,
        np.array([7, 8], np.int32),
        [replace(sample, turns=(), finish_reason=end) for sample, end in zip(made, ends, strict=True)],
    )


@dataclass(frozen=True)
class TrainedToken:
    """A trained token: its id, its sampler's log-probability, its trajectory and turn within the episode, and its own reward."""

    id: int
    behaviour: float
    trajectory: int
    turn: int
    reward: float


@dataclass(frozen=True)
class PlainEpisode:
    """An episode: its group, score and trained tokens. The last token's reward includes what no other token has of the score."""

    group: int
    score: float
    tokens: list[TrainedToken]


def plain_episodes(groups: Sequence[GroupRecord]) -> list[PlainEpisode]:
    """What an algorithm may know of the groups, in their order."""
    found = []
    for number, group in enumerate(groups):
        for episode in range(len(group.episodes)):
            tokens: list[TrainedToken] = []
            turns = 0
            for k, sample in enumerate(s for s in group.samples if s.episode == episode):
                for turn in sample.turns:
                    for t in range(turn.start, turn.end):
                        if sample.loss_mask[t]:
                            reward = turn.reward if t == turn.end - 1 else 0.0
                            tokens.append(TrainedToken(int(sample.token_ids[t]), float(sample.logprobs[t]), k, turns, reward))
                    turns += 1
                score = sample.score
            if tokens:
                rest = score - sum(token.reward for token in tokens)
                tokens[-1] = replace(tokens[-1], reward=tokens[-1].reward + rest)
            found.append(PlainEpisode(number, score, tokens))
    return found
