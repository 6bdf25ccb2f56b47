"""Converts the samples of an iteration's groups for their two readers: trajectories for the models, episodes for the algorithm.

Invariant: both have the samples in the order of the log, and per-token arrays in the order of `Sequences.offsets`. The offsets of
the episodes are among those of their trajectories.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from polyreme.api.v1.experience_pb2 import FINISH_REASON_LENGTH, OUTCOME_STOP
from polyreme.experience.records import GroupRecord, SampleRecord
from polyreme_trainer.algorithms.batch import TokenBatch, sequence_sums
from polyreme_trainer.megatron.batches.batch import FloatArray, IntArray, Routes, Sequences


def collect(
    groups: Sequence[GroupRecord],
    part_weights: Mapping[str, float] | None = None,
    greedy: bool = False,
    routes: Callable[[SampleRecord], Routes] | None = None,
) -> tuple[Sequences, TokenBatch]:
    """The samples of `groups`, in order, as the models' sequences (prompt + response) and as the algorithm's batch of episodes.

    Args:
        part_weights: the weights of the reward's named parts, for algorithms that normalise each part; None leaves the parts out.
        greedy: whether episodes without a trained token are greedy, the baseline of their group.
        routes: reads a sample's routes; None leaves them out.
    """
    samples = [(group, sample) for group in groups for sample in group.samples]
    ids = [np.concatenate([group.prompt_of(sample), sample.token_ids]).astype(np.int64) for group, sample in samples]
    blanks = [np.zeros(len(group.prompt_of(sample)) - 1, dtype=np.float32) for group, sample in samples]
    mask = np.concatenate(
        [part for b, (_, s) in zip(blanks, samples, strict=True) for part in (b, s.loss_mask)], dtype=np.float32
    )
    behaviour = np.concatenate([part for b, (_, s) in zip(blanks, samples, strict=True) for part in (b, s.logprobs)])
    version = np.full(len(mask), -1, dtype=np.int32)
    sequences = Sequences(ids, mask, routes=None if routes is None else [routes(sample) for _, sample in samples])
    for end, (_, sample) in zip(sequences.offsets[1:], samples, strict=True):
        begin = end - len(sample)
        for number, start, stop in sample.spans:
            version[begin + start : begin + stop] = number
    names = tuple(part_weights or ())
    numbers = [(number, episode) for number, group in enumerate(groups) for episode in group.episode_of]
    ends = [k for k, pair in enumerate(numbers) if numbers[k + 1 : k + 2] != [pair]]  # of each episode, its last trajectory
    last = [samples[k] for k in ends]
    parts = [[{part.name: part.raw for part in sample.parts}.get(name, 0.0) for name in names] for _, sample in last]
    offsets = np.concatenate([[0], sequences.offsets[1:][ends]]).astype(np.int64)
    batch = TokenBatch(
        offsets=offsets,
        mask=mask,
        behaviour=behaviour.astype(np.float32),
        version=version,
        group=np.array([numbers[k][0] for k in ends], dtype=np.int64),
        score=np.array([sample.score for _, sample in last], dtype=np.float64),
        truncated=np.array([_is_truncated(group, sample) for group, sample in last]),
        greedy=greedy & (sequence_sums(mask > 0, offsets) == 0),
        teacher=_per_token([s.teacher_logprobs for _, s in samples], sequences.offsets, np.nan),
        token_rewards=_per_token([_rewards(s) for _, s in samples], sequences.offsets, 0.0),
        turn=_turns([s for _, s in samples], sequences.offsets, numbers) if any(group.episodes for group in groups) else None,
        ids=np.concatenate([x[1:] for x in ids]),
        trajectories=np.diff(ends, prepend=-1),
        parts=np.array(parts, dtype=np.float64) if names else None,
        part_names=names,
        part_weights=tuple((part_weights or {}).values()),
    )
    return sequences, batch


def _is_truncated(group: GroupRecord, sample: SampleRecord) -> bool:
    """Whether a bound ended the episode whose last trajectory is `sample`."""
    if group.episodes:
        return group.episodes[sample.episode].outcome != OUTCOME_STOP
    return sample.finish_reason == FINISH_REASON_LENGTH


def _rewards(sample: SampleRecord) -> FloatArray | None:
    """float32 [t], the rewards of single tokens, and each turn's at its last token; None when the sample has neither."""
    if not any(turn.reward for turn in sample.turns):
        return sample.token_rewards
    rewards = np.zeros(len(sample), dtype=np.float32) if sample.token_rewards is None else sample.token_rewards.copy()
    for turn in sample.turns:
        rewards[turn.end - 1] += turn.reward
    return rewards


def _turns(samples: Sequence[SampleRecord], offsets: IntArray, numbers: Sequence[tuple[int, int]]) -> IntArray:
    """int64 [t], see `TokenBatch.turn`. `numbers`: the group and the episode of each sample."""
    turns, before = np.full(int(offsets[-1]), -1, dtype=np.int64), dict.fromkeys(numbers, 0)
    for sample, end, episode in zip(samples, offsets[1:], numbers, strict=True):
        start = end - len(sample)
        for first, last in [turn[:2] for turn in sample.turns] or [(0, len(sample))]:
            turns[start + first : start + last] = before[episode]
            before[episode] += 1
    return turns


def _per_token(responses: Sequence[FloatArray | None], offsets: IntArray, missing: float) -> FloatArray | None:
    """float32 [t], the numbers of each response's tokens, and `missing` elsewhere; None when no response has numbers."""
    if all(numbers is None for numbers in responses):
        return None
    result = np.full(int(offsets[-1]), missing, dtype=np.float32)
    for end, numbers in zip(offsets[1:], responses, strict=True):
        if numbers is not None:
            result[end - len(numbers) : end] = numbers
    return result
