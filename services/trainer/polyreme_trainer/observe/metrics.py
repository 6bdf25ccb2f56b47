"""One iteration as a metric record and as an observation for the alarms.

Invariant: both are pure functions of the groups, the training's metrics and the timings; they read no clock.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyreme.api.v1.experience_pb2 import FINISH_REASON_LENGTH
from polyreme.experience.records import GroupRecord
from polyreme_trainer.observe.alarms import Observation, is_repetitive


def iteration_record(
    iteration: int, groups: Sequence[GroupRecord], trained: Mapping[str, Any], seconds: Mapping[str, float], now: float
) -> dict[str, Any]:
    """The `iteration` record of the run's metrics.

    Args:
        groups: the groups that the iteration trained on. Greedy baselines count as generated tokens and samples only.
        trained: metrics of the training itself.
        seconds: wall-clock seconds of this iteration's parts on rank 0: iteration, learner_wait (for a plan), train, write.
        now: Unix time.
    """
    samples = [sample for group in groups for sample in group.sampled]
    scores = np.array([sample.score for sample in samples])
    lengths = np.array([len(sample.token_ids) for sample in samples])
    behaviour = np.concatenate([sample.logprobs for sample in samples])
    versions = [[span[0] for span in sample.spans] for sample in samples if sample.spans] or [[iteration - 1]]
    staleness = np.array([iteration - 1 - min(written_by) for written_by in versions])
    raw: dict[str, list[float]] = {}
    weighted: dict[str, list[float]] = {}
    for sample in samples:
        for part in sample.parts:
            raw.setdefault(part.name, []).append(part.raw)
            weighted.setdefault(part.name, []).append(part.weighted)
    tokens = sum(len(sample.token_ids) for group in groups for sample in group.samples)
    return {
        "kind": "iteration",
        "iteration": iteration,
        "time": now,
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        **{f"reward/{name}": float(np.mean(values)) for name, values in raw.items()},
        **{f"reward_weighted/{name}": float(np.mean(values)) for name, values in weighted.items()},
        "response/length_mean": float(lengths.mean()),
        "response/length_max": int(lengths.max()),
        "stop/length_fraction": float(np.mean([sample.finish_reason == FINISH_REASON_LENGTH for sample in samples])),
        **trained,
        "entropy": float(
            -behaviour.mean()
        ),  # of the sampling policy: the mean of -log p over its own tokens is an unbiased estimate
        "staleness/mean": float(staleness.mean()),
        "staleness/max": int(staleness.max()),
        "staleness/samples": np.bincount(staleness).tolist(),  # counts of samples with staleness 0, 1, ...
        "staleness/mixed_fraction": float(np.mean([len(set(written_by)) > 1 for written_by in versions])),
        **{f"time/{name}": value for name, value in seconds.items()},
        "time/generate": max(group.generate_seconds for group in groups),
        "time/score": max(group.score_seconds for group in groups),
        "tokens/generated": tokens,
        "tokens_per_second": tokens / seconds["iteration"],
        "samples_per_second": sum(len(group.samples) for group in groups) / seconds["iteration"],
    }


def observe(iteration: int, groups: Sequence[GroupRecord], trained: Mapping[str, Any], changed_tensors: int) -> Observation:
    """The iteration as the alarms see it."""
    samples = [sample for group in groups for sample in group.sampled]
    scores = [sample.score for sample in samples]
    return Observation(
        iteration=iteration,
        reward_min=min(scores),
        reward_max=max(scores),
        trained_samples=trained["trained_samples"],
        learning_rate=trained["actor/lr"],
        changed_tensors=changed_tensors,
        empty_fraction=float(np.mean([len(sample.token_ids) <= 1 for sample in samples])),
        repetitive_fraction=float(np.mean([is_repetitive(sample.token_ids.tolist()) for sample in samples])),
        length_stop_fraction=float(np.mean([sample.finish_reason == FINISH_REASON_LENGTH for sample in samples])),
        mismatch_kl=trained.get("mismatch_kl"),
    )
