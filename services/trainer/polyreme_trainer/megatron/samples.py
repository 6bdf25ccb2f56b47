"""Converts the samples of an iteration's groups for their two readers: sequences for the models, numbers per token for the algorithm.

Invariant: both have the samples in the order of the log, and per-token arrays in the order of `Sequences.offsets`.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from polyreme.api.v1.experience_pb2 import FINISH_REASON_LENGTH
from polyreme.experience.records import GroupRecord, SampleRecord
from polyreme_trainer.algorithms.batch import TokenBatch
from polyreme_trainer.megatron.batch import FloatArray, IntArray, Routes, Sequences


def collect(
    groups: Sequence[GroupRecord],
    part_weights: Mapping[str, float] | None = None,
    greedy: bool = False,
    routes: Callable[[SampleRecord], Routes] | None = None,
) -> tuple[Sequences, TokenBatch]:
    """The samples of `groups`, in order, as the models' sequences (prompt + response) and as the algorithm's batch.

    Args:
        part_weights: the weights of the reward's named parts, for algorithms that normalise each part; None leaves the parts out.
        greedy: whether samples without a trained token are greedy samples, the baseline of their group.
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
    parts = [[{part.name: part.raw for part in sample.parts}.get(name, 0.0) for name in names] for _, sample in samples]
    batch = TokenBatch(
        offsets=sequences.offsets,
        mask=mask,
        behaviour=behaviour.astype(np.float32),
        version=version,
        group=np.repeat(np.arange(len(groups), dtype=np.int64), [len(group.samples) for group in groups]),
        score=np.array([sample.score for _, sample in samples], dtype=np.float64),
        truncated=np.array([sample.finish_reason == FINISH_REASON_LENGTH for _, sample in samples]),
        greedy=np.array([greedy and not sample.loss_mask.any() for _, sample in samples]),
        teacher=_per_token([s.teacher_logprobs for _, s in samples], sequences.offsets, np.nan),
        token_rewards=_per_token([s.token_rewards for _, s in samples], sequences.offsets, 0.0),
        ids=np.concatenate([x[1:] for x in ids]),
        parts=np.array(parts, dtype=np.float64) if names else None,
        part_names=names,
        part_weights=tuple((part_weights or {}).values()),
    )
    return sequences, batch


def _per_token(responses: Sequence[FloatArray | None], offsets: IntArray, missing: float) -> FloatArray | None:
    """float32 [t], the numbers of each response's tokens, and `missing` elsewhere; None when no response has numbers."""
    if all(numbers is None for numbers in responses):
        return None
    result = np.full(int(offsets[-1]), missing, dtype=np.float32)
    for end, numbers in zip(offsets[1:], responses, strict=True):
        if numbers is not None:
            result[end - len(numbers) : end] = numbers
    return result
