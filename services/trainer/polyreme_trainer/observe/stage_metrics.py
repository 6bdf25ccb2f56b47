"""Every metric of a stage's records: name, unit and formula. The names of losses, rewards and accuracies are TRL's.

Invariant: a number that a stage records has exactly one row here, which the reference page prints.
"""

from polyreme_trainer.observe.registry import CHECKPOINT, ROUTING, Metric

_PAIRS = "on pairs of answers"
_DPO = "in the stage dpo"
_COMPARED = (
    "the log-ratio to the reference, summed over an answer's tokens (dpo, ipo, kto), or the mean log-probability (simpo, orpo)"
)

STAGE_METRICS = (
    Metric(
        "loss", "1", "Mean loss that the step minimises: over trained tokens in the stage sft, over rows in the other stages."
    ),
    Metric(
        "accuracy",
        "1",
        "Fraction of pairs whose chosen answer has the higher score. Equal scores count half; ties are left out.",
        "in the stage reward-model",
    ),
    Metric("margin", "score", "Mean difference of a pair's scores, without ties.", "in the stage reward-model"),
    Metric("mean_reward", "score", "Mean score of all answers.", "in the stage reward-model"),
    Metric("rewards/chosen", "1", f"Mean of beta times {_COMPARED} of the chosen or good answers.", _DPO),
    Metric("rewards/rejected", "1", "The same for the rejected or bad answers.", _DPO),
    Metric(
        "rewards/accuracies",
        "1",
        "Fraction of pairs whose chosen answer has the higher reward. Equal rewards count half.",
        _PAIRS,
    ),
    Metric("rewards/margins", "1", "rewards/chosen - rewards/rejected.", _PAIRS),
    Metric("logps/chosen", "nats", "Mean log-probability of the chosen or good answers, summed over an answer's tokens.", _DPO),
    Metric("logps/rejected", "nats", "The same for the rejected or bad answers.", _DPO),
    Metric(
        "kl",
        "nats",
        "KTO's estimate of the KL to the reference: mean log-ratio of mismatched answers, 0 or more; in an `eval` record over all held-out rows.",
        "with the loss kto",
    ),
    *ROUTING,
    Metric("grad_norm", "1", "Norm of the whole gradient before it is clipped.", "`step` records"),
    Metric("lr", "1", "Learning rate of the step.", "`step` records"),
    Metric("time/step", "s", "Wall-clock time of the step on the learner's rank 0.", "`step` records"),
    Metric("tokens_per_second", "tokens/s", "Tokens of the step's rows / time/step.", "`step` records"),
    *CHECKPOINT,
)
