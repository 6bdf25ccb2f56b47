"""The metrics of `iteration` and related records: name, unit and formula.

Invariant: every metric that training writes has exactly one row here, which the reference page prints. Names under `timing/`, `actor/`,
`critic/`, `response_length/` and `prompt_length/`, and those that end in `_tps`, are MindSpeed RL's and have its meaning. NAME is the name
of a reward or of a part of one. Metrics of a user's own loss have the user's names and no row.
"""

import re
from dataclasses import dataclass

STATISTICS = {"mean": "Mean", "max": "Largest", "min": "Smallest"}


@dataclass(frozen=True)
class Metric:
    """One number.

    Attributes:
        name: the name in a record; NAME stands for any text without a slash at its end.
        unit: the unit of the value; "1" for a ratio, a fraction or another number without a unit.
        formula: how the value is computed, as a sentence.
        when: the runs or iterations that have it; empty for all.
    """

    name: str
    unit: str
    formula: str
    when: str = ""

    def matches(self, name: str) -> bool:
        """Whether `name` is this metric's."""
        return re.fullmatch(re.escape(self.name).replace("NAME", ".+"), name) is not None


def statistics(name: str, unit: str, of: str, when: str = "") -> tuple[Metric, ...]:
    """Mean, maximum and minimum of one series."""
    return tuple(Metric(f"{name}/{key}", unit, f"{word} {of}.", when) for key, word in STATISTICS.items())


CRITIC = "with a critic"
CORRECTED = "with a correction"

REWARDS = (
    Metric("reward/mean", "score", "Mean score of the samples: the weighted sum of their rewards."),
    Metric("reward/std", "score", "Standard deviation of the samples' scores."),
    Metric("reward/NAME", "score", "Mean of one reward or of a part of it, without its weight."),
    Metric("reward_weighted/NAME", "score", "The same times its weight."),
    Metric("NAME_rewards/mean", "score", "Mean of one reward without its weight; parts of a reward have none."),
    *statistics("critic/score", "score", "score of a sample as the reward service gave it"),
    *statistics("critic/rewards", "score", "score of a sample after shaping, with the KL penalty where it is in the reward"),
    Metric(
        "truncated_sample_fraction",
        "1",
        "Fraction of samples that were cut off at the maximum length, or of episodes that a bound ended.",
    ),
    Metric("masked_sample_fraction", "1", "Fraction of samples that the recipe leaves out of the loss."),
    Metric("zero_variance_group_fraction", "1", "Fraction of groups whose samples all have the same score."),
    Metric("trained_samples", "samples", "Number of samples with a gradient."),
)
LENGTHS = (
    *statistics("response_length", "tokens", "number of sampled tokens of a response"),
    *statistics("prompt_length", "tokens", "number of tokens of a prompt"),
    Metric("stop/length_fraction", "1", "Fraction of responses that reached the maximum length."),
)
_PLAYED = "with an environment"
EPISODES = (
    *statistics("episode/turns", "turns", "number of turns of an episode", _PLAYED),
    Metric("episode/branches", "1", "Mean number of trajectories of an episode beyond the first one.", _PLAYED),
    Metric("episode/environment_seconds", "s", "Mean wall-clock time of an episode in its environment.", _PLAYED),
    Metric("episode/tool_calls", "calls", "Mean number of tool calls of an episode.", _PLAYED),
    Metric(
        "episode/tool_errors",
        "calls",
        "Mean number of tool calls of an episode that failed: malformed, or refused or raised by the tool.",
        _PLAYED,
    ),
    Metric(
        "episode/tool_seconds",
        "s",
        "Mean wall-clock time of an episode in its tools, a part of the time in its environment.",
        _PLAYED,
    ),
    Metric("episode/by_length", "1", "Fraction of episodes whose last turn reached its maximum length.", _PLAYED),
    Metric("episode/by_turns", "1", "Fraction of episodes that reached `environment.max_turns`.", _PLAYED),
    Metric("episode/by_tokens", "1", "Fraction of episodes that filled `rollout.max_model_len`.", _PLAYED),
    Metric("episode/by_time", "1", "Fraction of episodes that reached `environment.max_seconds`.", _PLAYED),
)
ACTOR = (
    Metric(
        "actor/pg_loss",
        "1",
        "Policy loss, aggregated as the recipe says; the mean over the optimizer steps. Not while only the critic is trained.",
    ),
    Metric(
        "actor/pg_clipfrac",
        "1",
        "Fraction of trained tokens whose clipped branch is active. As in the metrics below, tokens of samples without a gradient are not among them.",
        "with a clipped loss",
    ),
    Metric("actor/ppo_kl", "nats", "Mean of log p_old - log p over the trained tokens: k1 of the policy before the iteration."),
    Metric("actor/kl_loss", "nats", "Mean estimate of the KL to the reference over the trained tokens.", "with KL in the loss"),
    Metric(
        "actor/entropy",
        "nats",
        "Mean entropy of the policy's distribution at the trained tokens where the loss has an entropy term, else equal to `entropy`.",
    ),
    Metric("actor/lr", "1", "Learning rate of the iteration; 0 while only the critic is trained."),
    Metric(
        "padding_fraction",
        "1",
        "Positions of the actor's micro-batches that are padding: 0, or what sequence parallelism adds. The only metric that depends on the layout.",
    ),
    Metric("grad_norm", "1", "Norm of the actor's whole gradient before it is clipped; the mean over the optimizer steps."),
    Metric("entropy", "nats", "Mean of -log p of the sampled tokens: an unbiased estimate of the sampling policy's entropy."),
    Metric(
        "actor/teacher_kl",
        "nats",
        "Mean of log p - log p_teacher over the trained tokens, p before the iteration's first step: an estimate of the KL to the teacher.",
        "with a teacher",
    ),
    Metric("dual_clip_fraction", "1", "Fraction of trained tokens whose loss is limited by the dual clip.", "with a dual clip"),
    Metric("reward_kl", "nats", "Mean estimate of the KL to the reference over the trained tokens.", "with KL in the reward"),
    Metric("kl_coef", "1", "Coefficient of the KL penalty.", "with KL in the reward"),
    Metric(
        "reference/version", "1", "Policy version of the reference that the iteration used.", "with a reference that is renewed"
    ),
    Metric(
        "ptx_loss", "nats", "Mean cross entropy of the response tokens of the supervised rows that are mixed in.", "with `ptx`"
    ),
    *statistics("critic/advantages", "1", "advantage of a trained token"),
)
EXPERTS = "with experts"
ROUTING = (
    Metric(
        "moe/aux_loss",
        "1",
        "Load-balancing loss of an optimizer step without its coefficient: number of experts x sum over experts of choices per token x mean probability; the mean over layers and steps. With evenly used experts, the number of experts of a token. Like all metrics of experts over the tokens that the step computes: all, or without a balancing loss, z-loss or bias update those of samples with a gradient.",
        EXPERTS,
    ),
    Metric("moe/z_loss", "1", "Mean squared log-sum-exp of a token's router logits, over tokens, layers and steps.", EXPERTS),
    Metric("moe/imbalance", "1", "Tokens of a layer's most used expert / mean over its experts; the mean over layers.", EXPERTS),
    Metric("moe/imbalance_max", "1", "The largest of these ratios over all layers and steps.", EXPERTS),
    Metric("moe/unused_expert_fraction", "1", "Fraction of experts to which an optimizer step sends no token.", EXPERTS),
)
REPLAY = (
    Metric(
        "moe/mismatch_kl_replayed",
        "nats",
        "k3 of KL(sampling || learner) of up to 16 fresh samples before the step, with the replica's experts.",
        "with `replay_routes`",
    ),
    Metric("moe/mismatch_kl_routed", "nats", "The same with the experts of the learner's routers.", "with `replay_routes`"),
)
VALUES = (
    *statistics("critic/returns", "score", "return of a trained token: the target of its value", CRITIC),
    *statistics("critic/values", "score", "value of a trained token before the iteration", CRITIC),
    Metric(
        "critic/vf_loss", "1", "Value loss: half the squared error, the larger of clipped and free, over trained tokens.", CRITIC
    ),
    Metric("critic/vf_clipfrac", "1", "Fraction of trained tokens whose clipped value error is the larger one.", CRITIC),
    Metric("critic/explained_variance", "1", "1 - Var(return - value) / Var(return) over the trained tokens.", CRITIC),
    Metric(
        "critic/grad_norm", "1", "Norm of the critic's gradient before it is clipped; the mean over the optimizer steps.", CRITIC
    ),
    Metric("critic/lr", "1", "Learning rate of the critic.", CRITIC),
)
CORRECTION = (
    Metric(
        "mismatch_kl",
        "nats",
        "k3 of KL(sampling || learner) over samples that the policy before the step sampled completely: the difference between the engines.",
    ),
    Metric("off_policy_kl", "nats", "k3 of KL(sampling policy || policy before the step) over the trained tokens."),
    Metric("importance/weight_mean", "1", "Mean of w = p_old / p_sampling over the trained tokens."),
    Metric("importance/weight_max", "1", "Largest w."),
    Metric(
        "importance/truncated_fraction",
        "1",
        "Fraction of trained tokens whose weight was reduced to its cap.",
        "with a capped weight",
    ),
    Metric("correction_factor", "1", "Mean factor of the corrections.", CORRECTED),
    Metric("dropped_token_fraction", "1", "Fraction of trained tokens whose factor is 0.", CORRECTED),
    Metric("dropped_sequence_fraction", "1", "Fraction of samples in which every token has the factor 0.", CORRECTED),
)
STALENESS = (
    Metric("staleness/mean", "iterations", "Mean staleness of a sample: iteration - 1 - oldest version among its tokens."),
    Metric("staleness/max", "iterations", "Largest staleness."),
    Metric("staleness/samples", "samples", "A list of the numbers of samples with staleness 0, 1, ..."),
    Metric("staleness/mixed_fraction", "1", "Fraction of samples that more than one version sampled."),
)
PARTIAL = (
    Metric(
        "partial/carried_samples",
        "samples",
        "Number of trained samples that more than one version sampled: partial rollouts that were continued.",
    ),
    Metric("partial/carried_tokens", "tokens", "Number of their tokens that were sampled before their newest version."),
    Metric("partial/parts_mean", "1", "Mean number of parts of a trained sample; a part is what one version sampled."),
    Metric("partial/parts_max", "1", "Largest number of parts of a trained sample."),
)
LOOP = (
    Metric("time/iteration", "s", "Wall-clock time of the iteration, measured on the learner's rank 0 like its parts."),
    Metric("time/learner_wait", "s", "Part of `time/iteration`: waiting for samples."),
    Metric("time/train", "s", "Part of `time/iteration`: everything from reading the samples to the last optimizer step."),
    Metric("time/write", "s", "Part of `time/iteration`: writing the new version for the replicas."),
)
_COLOCATED = "with placement: colocated"
DEVICES = (
    Metric("time/device_leave", "s", "Part of `time/iteration`: leaving the devices to the replicas.", _COLOCATED),
    Metric("time/device_wait", "s", "Part of `time/iteration`: waiting for the devices and returning to them.", _COLOCATED),
    Metric("device/freed_bytes", "B", "Memory that rank 0 freed when it last left its device; 0 on CPU.", _COLOCATED),
    Metric(
        "device/peak_bytes",
        "B",
        "Peak memory of rank 0's tensors in its previous turn; on CPU, the peak resident size of its process.",
        _COLOCATED,
    ),
)
_OFFLOADED = "with `trainer.offload`"
OFFLOAD = (
    Metric("timing/offload", "s", "Moves of models and optimizer state between device and host on rank 0.", _OFFLOADED),
    Metric("offload/moved_bytes", "B", "Bytes moved, in both directions together.", _OFFLOADED),
)
TIMING = (
    Metric("timing/all", "s", "`time/iteration`."),
    Metric("timing/rollout", "s", "Generation of the slowest group."),
    Metric(
        "timing/old_log_p",
        "s",
        "Log-probabilities under the policy before the iteration; 0 where the step's own pass gives them.",
    ),
    Metric("timing/reference_model", "s", "Log-probabilities under the reference."),
    Metric("timing/critic_model", "s", "Values before the iteration."),
    Metric("timing/adv", "s", "Shaping, advantages and returns."),
    Metric("timing/update", "s", "The actor's optimizer steps."),
    Metric("timing/update_critic", "s", "The critic's optimizer steps."),
    Metric("timing/rule_reward", "s", "Scoring of the slowest group, where a reward other than a model is configured; else 0."),
    Metric("timing/reward_model", "s", "Scoring of the slowest group, where a reward model is configured; else 0."),
    Metric(
        "timing/resharding_to_infer", "s", "Equal to `time/write`: replicas have their own weights, which a version replaces."
    ),
    Metric("timing/resharding_to_train", "s", "Always 0: the learner keeps its own weights in their training layout."),
    Metric("timing/ref_onload", "s", "Always 0: `timing/offload` covers all moves."),
    Metric("timing/ref_offload", "s", "Always 0: `timing/offload` covers all moves."),
    Metric(
        "timing/non_overlap_reference_model",
        "s",
        "Equal to `timing/reference_model`: nothing else runs on the learner meanwhile.",
    ),
    Metric("timing/non_overlap_adv", "s", "Equal to `timing/adv`: nothing else runs on the learner meanwhile."),
    Metric(
        "timing/non_overlap_rule_reward",
        "s",
        "Scoring that the learner waited for: min(timing/rule_reward, max(0, time/learner_wait - timing/rollout)).",
    ),
    Metric("timing/non_overlap_reward_model", "s", "The same for `timing/reward_model`."),
)
_TOKENS = "(response_length/mean + prompt_length/mean) x samples, greedy baselines included,"
THROUGHPUT = (
    Metric(
        "e2e_tps",
        "tokens/s per device",
        f"{_TOKENS} / (learner ranks + devices of the configured replicas; the larger of both where they share them) / timing/all.",
    ),
    Metric("update_tps", "tokens/s per device", f"{_TOKENS} / learner ranks / timing/update.", "where the actor is trained"),
    Metric("vllm_tps", "tokens/s per device", f"{_TOKENS} / devices of the configured replicas / timing/rollout."),
    Metric("tokens/generated", "tokens", "Sampled tokens of the iteration."),
    Metric("tokens_per_second", "tokens/s", "tokens/generated / time/iteration."),
    Metric("samples_per_second", "samples/s", "Samples / time/iteration."),
)
CHECKPOINT = (
    Metric(
        "checkpoint/seconds",
        "s",
        "Time in which a checkpoint and its export were written, while training continued.",
        "`saved` records",
    ),
    Metric(
        "checkpoint/stall_seconds",
        "s",
        "Time for which a checkpoint stalled training: the wait for the previous one, and the copy to host memory.",
        "`saved` records",
    ),
)
_MEASURED = "once in ten seconds"
RESOURCES = (
    *(
        metric
        for role, of in (
            ("trainer", "the trainer on its machine: orchestrator and learner"),
            ("rollout", "the replicas"),
            ("reward", "the reward servers"),
            ("environment", "the environment servers"),
        )
        for metric in (
            Metric(f"resources/{role}/cores", "cores", f"Mean number of processor cores in use by {of}.", _MEASURED),
            Metric(f"resources/{role}/memory_bytes", "B", f"Largest resident memory of {of}.", _MEASURED),
        )
    ),
    Metric(
        "resources/device_busy_fraction",
        "1",
        "Mean share of time in which kernels ran on the devices of these machines.",
        f"{_MEASURED}, with NVIDIA devices",
    ),
    Metric(
        "resources/device_memory_bytes",
        "B",
        "Largest memory in use on all devices of these machines.",
        f"{_MEASURED}, with NVIDIA devices",
    ),
)

BESIDE = (
    Metric(
        "time/rollout_wait", "s", "Mean time for which replicas waited for work since the previous plan.", "`rollout` records"
    ),
    Metric(
        "rollout/paused_samples",
        "samples",
        "Number of samples that used up their token budget since the previous plan, and waited for the next version.",
        "`rollout` records with `tokens_per_iteration`",
    ),
    Metric(
        "rollout/parts_beyond_budget",
        "1",
        "Number of parts beyond the budget that groups got since the previous plan, because the plan was impossible without them.",
        "`rollout` records with `tokens_per_iteration`",
    ),
    Metric(
        "rollout/dropped_groups",
        "groups",
        "Number of groups dropped since the previous plan.",
        "`rollout` records of dynamic sampling",
    ),
    Metric(
        "rollout/mean_score", "score", "Mean score of all groups, dropped ones included.", "`rollout` records of dynamic sampling"
    ),
    Metric(
        "rollout/skipped_prompts",
        "prompts",
        "Number of prompts skipped since the previous plan because they were always or never solved.",
        "`rollout` records with `skip_prompts`",
    ),
    *(
        Metric(
            f"online/{name}",
            "sessions",
            f"Number of a product's sessions that {what}.",
            "`rollout` records with `environment.online`",
        )
        for name, what in (
            ("open", "are open, or wait for their reward"),
            ("complete", "have a reward, and wait for their group"),
            ("trained", "became groups, since the run began"),
            ("refused", "were refused beyond max_sessions"),
            ("unrecorded", "were served beyond max_sessions, and not kept"),
            ("dropped_stale", "were dropped because of the age of their policy"),
            ("dropped_no_reward", "were dropped without a reward"),
            ("dropped_no_group", "were dropped without enough others of their task"),
            ("dropped_invalid", "were dropped because their turns could not be read"),
        )
    ),
    Metric("rollout/pass_rate", "1", "Fraction of solved samples of the other prompts.", "`rollout` records with `skip_prompts`"),
    Metric(
        "accuracy", "1", "Fraction of held-out prompts with a right greedy answer.", "`eval` records of rewards that are 0 or 1"
    ),
    Metric("score", "score", "Mean score of the greedy answers to the held-out prompts.", "other `eval` records"),
    Metric(
        "SET/METRIC",
        "1 or score",
        "Metrics of a named held-out set: its mean, its metrics over several answers, reward/NAME.",
        "`eval` records",
    ),
    Metric("sft_NAME/loss", "nats", "Mean cross entropy of the step's trained tokens.", "`sft` records; NAME is the phase"),
    Metric(
        "weights/stall_seconds", "s", "Time for which generation paused while a replica loaded a version.", "`commit` records"
    ),
    Metric("weights/reload_seconds", "s", "Time in which a replica's engine loaded the version's weights.", "`commit` records"),
    Metric(
        "weights/bytes", "B", "Bytes that the trainer sent to a replica for a version; 0 where it maps them.", "`commit` records"
    ),
    Metric(
        "weights/relayed_bytes",
        "B",
        "Bytes that another replica sent to the replica instead.",
        "`commit` records of relayed versions",
    ),
    Metric(
        "weights/hops",
        "1",
        "Number of transfers between the trainer and the replica; 1: directly from the trainer.",
        "`commit` records of streams",
    ),
    Metric("weights/density", "1", "Fraction of the version's elements in a delta.", "`commit` records of deltas"),
    Metric("weights/encode_seconds", "s", "Time in which the trainer computed a delta.", "`commit` records of deltas"),
    Metric("weights/apply_seconds", "s", "Time in which a replica applied and verified a delta.", "`commit` records of deltas"),
    Metric(
        "weights/canary_difference",
        "nats",
        "Mean absolute difference between a replica's and the learner's log-probabilities of the canary.",
        "`commit` records",
    ),
    *CHECKPOINT,
    Metric("next_group", "1", "Index of the group at which the data continues.", "where the samples were written to disk"),
)

SECTIONS = {
    "Rewards": REWARDS,
    "Lengths": LENGTHS,
    "Episodes": EPISODES,
    "Actor": ACTOR,
    "Experts": (*ROUTING, *REPLAY),
    "Critic": VALUES,
    "Correction": CORRECTION,
    "Staleness": STALENESS,
    "Partial rollouts": PARTIAL,
    "The learner's loop": LOOP,
    "Shared devices": DEVICES,
    "Offload": OFFLOAD,
    "Parts of an iteration": TIMING,
    "Throughput": THROUGHPUT,
    "Resources": RESOURCES,
    "Beside the iteration": BESIDE,
}
"""Titles of the reference page, and the metrics under each."""

METRICS = tuple(metric for section in SECTIONS.values() for metric in section)


def find(name: str) -> Metric | None:
    """The row of a metric: the row with its exact name, otherwise the row whose NAME matches; None when there is none."""
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in METRICS if metric.matches(name)), None)


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
    *(metric for metric in RESOURCES if metric.name.startswith(("resources/trainer/", "resources/device_"))),
)
"""The metrics of a stage's records. The names of losses, rewards and accuracies are TRL's."""

SERVICE_METRICS = (
    Metric("loss", "1", "Sum of the losses of the step's batches / `trained_tokens`."),
    Metric("loss_sum", "1", "Sum of the losses of the step's batches, as the client's loss defines it."),
    Metric("grad_norm", "1", "Norm of the whole gradient before it is clipped."),
    Metric("lr", "1", "Learning rate of the step, as the client gave it."),
    Metric("optimizer_steps", "1", "Steps of the optimizer, which starts again when weights are loaded without it."),
    Metric("sequences", "1", "Sequences of the step's batches."),
    Metric("tokens", "tokens", "Tokens of the step's batches."),
    Metric("trained_tokens", "tokens", "Of these, tokens whose weight or advantage is not 0."),
    Metric("tokens_per_second", "tokens/s", "`tokens` / `time/step`."),
    Metric("time/step", "s", "Wall-clock time since the step before, the sum of the next three."),
    Metric("time/execute", "s", "The learner executed a request of the model."),
    Metric("time/queue", "s", "A request of the model waited, since those of other models were executed."),
    Metric("time/client", "s", "The model had no request."),
)
