"""Metrics of a whole iteration's scores, rewards and advantages.

Invariant: every rank computes the same numbers from the same batch, so they are never summed over ranks.
"""

import numpy as np

from polyreme_trainer.algorithms.batch import Bool, Float64, TokenBatch
from polyreme_trainer.algorithms.groups import Groups
from polyreme_trainer.algorithms.rewards import Rewards


def summary(
    batch: TokenBatch,
    rewards: Rewards,
    advantages: Float64,
    returns: Float64 | None,
    dropped: Bool,
    kl: Float64 | None,
    kl_coef: float | None,
) -> dict[str, tuple[float, float]]:
    """The metrics of an iteration, name -> (sum, weight).

    - Per sample, without greedy ones: `score` before shaping, `reward` after shaping and with process rewards and KL penalty,
      `truncated_sample_fraction`, `masked_sample_fraction`.
    - Per trained token: `advantage`, `return`, `value`, `reward_kl`, `teacher_kl` (log p of the policy minus log p of the
      teacher).
    - `_max` and `_min` of `score`, `reward`, `advantage`, `return` and `value`.
    - Per group: `zero_variance_group_fraction`.
    - `explained_variance` of the returns by the values, unless the returns are constant; `kl_coef`, the coefficient that was used.
    """
    sampled, trained = ~batch.greedy, batch.trained
    series = {"score": batch.score[sampled], "reward": rewards.totals[sampled], "advantage": advantages[trained]}
    if returns is not None:
        series["return"] = returns[trained]
    if returns is not None and batch.values is not None:
        series["value"] = batch.values[trained].astype(np.float64)
    metrics: dict[str, tuple[float, float]] = {}
    for name, x in series.items():
        if len(x):
            metrics[name] = (float(x.sum()), float(len(x)))
            metrics[f"{name}_max"], metrics[f"{name}_min"] = (float(x.max()), 1.0), (float(x.min()), 1.0)
    samples = float(sampled.sum())
    metrics["truncated_sample_fraction"] = (float(batch.truncated[sampled].sum()), samples)
    metrics["masked_sample_fraction"] = (float(dropped[sampled].sum()), samples)
    groups = Groups(batch.group[sampled])
    constant = groups.constant(rewards.scores[sampled])
    metrics["zero_variance_group_fraction"] = (float((constant / groups.sizes[groups.member_of]).sum()), float(len(groups)))
    if "value" in series and (variance := float(series["return"].var()) if len(series["return"]) else 0.0) > 0:
        metrics["explained_variance"] = (1.0 - float((series["return"] - series["value"]).var()) / variance, 1.0)
    if batch.teacher is not None:
        metrics["teacher_kl"] = (float((batch.policy - batch.teacher)[trained].astype(np.float64).sum()), float(trained.sum()))
    if kl is not None and kl_coef is not None:
        metrics["reward_kl"], metrics["kl_coef"] = (float(kl.sum()), float(trained.sum())), (kl_coef, 1.0)
    return metrics
