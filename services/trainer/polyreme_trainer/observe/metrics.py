"""One iteration as a metric record and as an observation for the alarms: pure functions of groups, training metrics and timings.

Invariant: every number of a record has a row in `registry`, which defines it.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from polyreme.api.v1.experience_pb2 import FINISH_REASON_LENGTH, OUTCOME_LENGTH, OUTCOME_TIME, OUTCOME_TOKENS, OUTCOME_TURNS
from polyreme.config.run import RunConfig
from polyreme.experience.metric_records import IterationTrained, MetricValues
from polyreme.experience.records import GroupRecord, SampleRecord
from polyreme_trainer.observe.alarms import Observation, is_repetitive


def iteration_record(
    iteration: int,
    groups: Sequence[GroupRecord],
    trained: MetricValues,
    seconds: Mapping[str, float],
    now: float,
    config: RunConfig,
) -> IterationTrained:
    """The `iteration` record of the run's metrics.

    Args:
        groups: the groups that the iteration trained on. Greedy baselines count as generated tokens and samples only. Scores are
            counted per episode; lengths count sampled tokens.
        trained: metrics of the training itself.
        seconds: wall-clock seconds of this iteration's parts on rank 0: iteration, learner_wait (for a plan), train, write.
        now: Unix time.
        config: the run's configuration, for its rewards and devices.
    """
    samples = [sample for group in groups for sample in group.sampled]
    scored = [sample for group in groups for sample in group.scored]
    scores = np.array([sample.score for sample in scored])
    lengths = np.array([sample.sampled_tokens for sample in samples])
    prompts = np.array([len(group.prompt_of(sample)) for group in groups for sample in group.sampled])
    entropy = float(-np.concatenate([sample.logprobs for sample in samples]).sum() / lengths.sum())
    tokens = sum(sample.sampled_tokens for group in groups for sample in group.samples)
    trained_on = sum(len(group.prompt_of(sample)) + len(sample) for group in groups for sample in group.samples)
    timing = timings(groups, trained, seconds, config)
    metrics = {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        **part_means(scored),
        **statistics("response_length", lengths),
        **statistics("prompt_length", prompts),
        **episodes(groups),
        "stop/length_fraction": float(np.mean([sample.finish_reason == FINISH_REASON_LENGTH for sample in samples])),
        "actor/entropy": entropy,
        **trained,
        "entropy": entropy,
        **staleness(iteration, samples),
        **carried(samples),
        **{f"time/{name}": value for name, value in seconds.items()},
        **timing,
        **throughput(trained_on, timing, trained.get("timing/update", 0.0), config),
        "tokens/generated": tokens,
        "tokens_per_second": tokens / seconds["iteration"],
        "samples_per_second": sum(len(group.samples) for group in groups) / seconds["iteration"],
    }
    return IterationTrained(iteration=iteration, time=now, metrics=metrics)


def statistics(name: str, values: NDArray[np.int64]) -> dict[str, float]:
    """Mean, maximum and minimum of a series [n], n > 0."""
    return {f"{name}/mean": float(values.mean()), f"{name}/max": int(values.max()), f"{name}/min": int(values.min())}


def episodes(groups: Sequence[GroupRecord]) -> dict[str, float]:
    """The metrics of episodes, baselines included; none in a run without an environment."""
    played = [episode for group in groups for episode in group.episodes]
    if not played:
        return {}
    turns = [
        sum(len(sample.turns) for sample in group.samples if sample.episode == number)
        for group in groups
        for number in range(len(group.episodes))
    ]
    calls = [call for group in groups for sample in group.samples for turn in sample.turns for call in turn.tool_calls]
    bounds = {"length": OUTCOME_LENGTH, "turns": OUTCOME_TURNS, "tokens": OUTCOME_TOKENS, "time": OUTCOME_TIME}
    return {
        **statistics("episode/turns", np.array(turns)),
        "episode/branches": sum(bool(group.episodes) * (len(group.samples) - len(group.episodes)) for group in groups)
        / len(played),
        "episode/environment_seconds": float(np.mean([episode.seconds for episode in played])),
        "episode/tool_calls": len(calls) / len(played),
        "episode/tool_errors": sum(bool(call.error) for call in calls) / len(played),
        "episode/tool_seconds": sum(call.seconds for call in calls) / len(played),
        **{
            f"episode/by_{name}": float(np.mean([each.outcome == outcome for each in played])) for name, outcome in bounds.items()
        },
    }


def part_means(samples: Sequence[SampleRecord]) -> dict[str, float]:
    """Mean of each reward and each part of one over the samples that have it, without and with its weight."""
    raw: dict[str, list[float]] = {}
    weighted: dict[str, list[float]] = {}
    for sample in samples:
        for part in sample.parts:
            raw.setdefault(part.name, []).append(part.raw)
            weighted.setdefault(part.name, []).append(part.weighted)
    means = {name: float(np.mean(values)) for name, values in raw.items()}
    return {
        **{f"reward/{name}": mean for name, mean in means.items()},
        **{f"{name}_rewards/mean": mean for name, mean in means.items() if "/" not in name},
        **{f"reward_weighted/{name}": float(np.mean(values)) for name, values in weighted.items()},
    }


def staleness(iteration: int, samples: Sequence[SampleRecord]) -> dict[str, object]:
    """The staleness metrics: how many versions the samples are behind the trained policy."""
    versions = [[span[0] for span in sample.spans] for sample in samples if sample.spans] or [[iteration - 1]]
    lag = np.array([iteration - 1 - min(written_by) for written_by in versions])
    return {
        "staleness/mean": float(lag.mean()),
        "staleness/max": int(lag.max()),
        "staleness/samples": np.bincount(lag).tolist(),
        "staleness/mixed_fraction": float(np.mean([len(set(written_by)) > 1 for written_by in versions])),
    }


def carried(samples: Sequence[SampleRecord]) -> dict[str, object]:
    """The metrics of partial rollouts: samples and tokens that newer versions continued. A part is the tokens of one version."""
    parts = [len({version for version, _, _ in sample.spans}) for sample in samples]
    tokens = 0
    for sample in samples:
        newest = max(version for version, _, _ in sample.spans)
        tokens += sum(end - start for version, start, end in sample.spans if version < newest)
    return {
        "partial/carried_samples": sum(count > 1 for count in parts),
        "partial/carried_tokens": tokens,
        "partial/parts_mean": float(np.mean(parts)),
        "partial/parts_max": max(parts),
    }


def timings(
    groups: Sequence[GroupRecord], trained: MetricValues, seconds: Mapping[str, float], config: RunConfig
) -> dict[str, float]:
    """The `timing/` metrics that the training itself does not measure, in seconds."""
    specs = config.reward.rewards if config.reward else []
    generated, scored = (max(group.generate_seconds for group in groups), max(group.score_seconds for group in groups))
    exposed = min(scored, max(0.0, seconds["learner_wait"] - generated))
    by_rule, by_model = any(spec.model is None for spec in specs), any(spec.model is not None for spec in specs)
    return {
        "timing/all": seconds["iteration"],
        "timing/rollout": generated,
        "timing/rule_reward": scored if by_rule else 0.0,
        "timing/reward_model": scored if by_model else 0.0,
        "timing/resharding_to_infer": seconds["write"],
        "timing/resharding_to_train": 0.0,
        "timing/ref_onload": 0.0,
        "timing/ref_offload": 0.0,
        "timing/non_overlap_reference_model": trained.get("timing/reference_model", 0.0),
        "timing/non_overlap_adv": trained.get("timing/adv", 0.0),
        "timing/non_overlap_rule_reward": exposed if by_rule else 0.0,
        "timing/non_overlap_reward_model": exposed if by_model else 0.0,
    }


def throughput(tokens: int, timing: Mapping[str, float], update: float, config: RunConfig) -> dict[str, float]:
    """The `_tps` metrics, in tokens per second and device.

    Args:
        tokens: the number of tokens of all prompts (once per sample) and of what follows them.
        update: seconds of the actor's optimizer steps; 0 when there was none or it was not measured.
    """
    ranks, replicas = config.trainer.parallel.world_size, max(1, config.rollout.replicas) * config.rollout.tensor_parallel
    parts = {
        "e2e_tps": (max(ranks, replicas) if config.placement == "colocated" else ranks + replicas, timing["timing/all"]),
        "update_tps": (ranks, update),
        "vllm_tps": (replicas, timing["timing/rollout"]),
    }
    return {name: tokens / devices / seconds for name, (devices, seconds) in parts.items() if seconds > 0}


def last_turn(sample: SampleRecord) -> int:
    """The first token of a sample's last turn."""
    return sample.turns[-1].start if sample.turns else 0


def observe(iteration: int, groups: Sequence[GroupRecord], trained: MetricValues, changed_tensors: int) -> Observation:
    """The iteration as the alarms see it."""
    samples = [sample for group in groups for sample in group.sampled]
    scores = [sample.score for group in groups for sample in group.scored]
    return Observation(
        iteration=iteration,
        reward_min=min(scores),
        reward_max=max(scores),
        trained_samples=trained["trained_samples"],
        learning_rate=trained["actor/lr"],
        changed_tensors=changed_tensors,
        empty_fraction=float(np.mean([sample.sampled_tokens <= 1 for sample in samples])),
        repetitive_fraction=float(np.mean([is_repetitive(sample.token_ids[last_turn(sample) :].tolist()) for sample in samples])),
        length_stop_fraction=float(np.mean([sample.finish_reason == FINISH_REASON_LENGTH for sample in samples])),
        mismatch_kl=trained.get("mismatch_kl"),
    )
