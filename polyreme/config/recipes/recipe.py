"""A recipe: the primitives of an algorithm and their parameters, as plain data that a configuration file can hold.

Invariant: each primitive reads all its parameters, and a parameter that the chosen primitive does not have is an error.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from polyreme.config.section import Section

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


KIND = "The name of this primitive."


class Primitive(Section):
    """One part of a recipe."""


class Estimator(Primitive):
    """An advantage estimator. Its class attributes say what it needs, for the checks of a recipe and of a batch.

    Attributes:
        compares_samples: it compares the samples of a group, so that a group has at least two.
        per_token: the advantages within a response may differ.
        learns_from_equal: it may learn from a group whose scores are all equal.
        reads_score: it reads the score, so that shaping and a KL penalty in the reward have an effect.
        admits_greedy: a group may have greedy samples among the others.
        needs_critic, needs_parts, needs_greedy: it needs a critic's values, the reward's parts, a greedy sample of each prompt.
    """

    kind: str
    compares_samples: ClassVar[bool] = False
    per_token: ClassVar[bool] = False
    learns_from_equal: ClassVar[bool] = True
    reads_score: ClassVar[bool] = True
    admits_greedy: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = False
    needs_parts: ClassVar[bool] = False
    needs_greedy: ClassVar[bool] = False


class GroupEstimator(Estimator):
    """Compares the scores of a group. A group with equal scores has advantages of exactly 0."""

    compares_samples = True
    learns_from_equal = False


class LengthAdaptive(Primitive):
    """VAPO: lam = 1 - 1 / (alpha * tokens) for each response."""

    alpha: Positive = Field(0.05, description="How fast lam rises with the response length.")


class Gae(Estimator):
    """Generalised advantage estimation, the only estimator that uses a critic."""

    per_token = True
    admits_greedy = True
    needs_critic = True

    kind: Literal["gae"] = Field("gae", description=KIND)
    gamma: Fraction = Field(1.0, description="Discount of later rewards, per token.")
    lam: Fraction | LengthAdaptive = Field(0.95, description="GAE lambda of the policy's advantages.")
    value_lam: Fraction | None = Field(None, description="GAE lambda of the critic's returns. null: lam.")
    bootstrap_truncated: bool = Field(False, description="Bootstrap a truncated response with the critic's value.")
    whiten: bool = Field(True, description="Whiten the advantages over the batch (mean 0, standard deviation 1).")
    value_clip: Positive | None = Field(0.5, description="Clip range of the critic's value change. null: no clipping.")


class GroupNorm(GroupEstimator):
    """Score minus the group mean, divided by the group standard deviation."""

    kind: Literal["group_norm"] = Field("group_norm", description=KIND)
    std_floor: float = Field(1e-4, ge=0, description="Added to a group's standard deviation.")
    ddof: Literal[0, 1] = Field(1, description="1: sample standard deviation. 0: population standard deviation.")


class GroupMean(GroupEstimator):
    """Score minus the group mean."""

    kind: Literal["group_mean"] = Field("group_mean", description=KIND)
    whiten: bool = Field(False, description="Whiten over the batch. Groups with equal scores stay at 0.")


class LeaveOneOut(GroupEstimator):
    """Score minus the mean score of the other samples of the group."""

    kind: Literal["leave_one_out"] = Field("leave_one_out", description=KIND)


class Returns(Estimator):
    """Discounted rewards-to-go per token. The only baseline is the batch mean."""

    per_token = True
    admits_greedy = True

    kind: Literal["returns"] = Field("returns", description=KIND)
    gamma: Fraction = Field(1.0, description="Discount of later rewards, per token.")
    whiten: bool = Field(True, description="Whiten the advantages over the batch (mean 0, standard deviation 1).")


class GreedyBaseline(Estimator):
    """Rewards-to-go per token minus the score of the greedy response."""

    per_token = True
    admits_greedy = True
    needs_greedy = True

    kind: Literal["greedy_baseline"] = Field("greedy_baseline", description=KIND)


class LengthWeightedBaseline(GroupEstimator):
    """Score minus the length-weighted group mean."""

    kind: Literal["length_weighted_baseline"] = Field("length_weighted_baseline", description=KIND)


class BestOfGroup(GroupEstimator):
    """What a sample adds to the group's best score, for pass@k with k = group_size: only the best sample has an advantage."""

    kind: Literal["best_of_group"] = Field("best_of_group", description=KIND)


class PerPart(Estimator):
    """The weighted sum of the reward parts, each normalised within its group."""

    compares_samples = True
    reads_score = False
    needs_parts = True

    kind: Literal["per_part"] = Field("per_part", description=KIND)
    std_floor: float = Field(1e-4, ge=0, description="Added to a group's standard deviation.")
    ddof: Literal[0, 1] = Field(1, description="1: sample standard deviation. 0: population standard deviation.")
    whiten: bool = Field(True, description="Whiten over the batch. Groups whose parts are all equal stay at 0.")


class TurnNorm(Estimator):
    """The return from each turn on, normalised over all turns of the group's episodes."""

    compares_samples = True
    per_token = True

    kind: Literal["turn_norm"] = Field("turn_norm", description=KIND)
    gamma: Fraction = Field(1.0, description="Discount of later rewards, per turn.")
    std_floor: float = Field(1e-4, ge=0, description="Added to a group's standard deviation.")
    ddof: Literal[0, 1] = Field(1, description="1: sample standard deviation. 0: population standard deviation.")


class Positives(Estimator):
    """1 for an accepted sample, 0 for any other."""

    kind: Literal["positives"] = Field("positives", description=KIND)
    threshold: float = Field(0.0, description="A sample is accepted when its score is above this.")


class Zero(Estimator):
    """No advantage from the reward, for pure distillation."""

    reads_score = False
    admits_greedy = True

    kind: Literal["zero"] = Field("zero", description=KIND)


AdvantageEstimator = Annotated[
    Gae
    | GroupNorm
    | GroupMean
    | LeaveOneOut
    | Returns
    | GreedyBaseline
    | LengthWeightedBaseline
    | BestOfGroup
    | PerPart
    | TurnNorm
    | Positives
    | Zero,
    Field(discriminator="kind"),
]


class Clip(Primitive):
    """PPO's clipped surrogate."""

    kind: Literal["clip"] = Field("clip", description=KIND)
    low: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="The ratio is clipped below 1 - low.")
    high: Positive = Field(0.2, description="The ratio is clipped above 1 + high.")
    dual: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Dual clip: bound on the ratio where the advantage is negative."
    )
    ratio: Literal["token", "sequence"] = Field(
        "token", description="token: one ratio per token. sequence: the geometric mean over the response (GSPO)."
    )


class GeometricMean(Primitive):
    """The geometric mean of clipped ratios (GMPO)."""

    kind: Literal["geometric_mean"] = Field("geometric_mean", description=KIND)
    low: Positive = Field(0.4, description="Lower clip of the log-ratio.")
    high: Positive = Field(0.4, description="Upper clip of the log-ratio.")


class Cispo(Primitive):
    """The clipped ratio is a constant weight, so every token keeps its gradient."""

    kind: Literal["cispo"] = Field("cispo", description=KIND)
    low: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="1: no lower bound.")
    high: Positive = Field(4.0, description="The weight is at most 1 + high.")


class Sapo(Primitive):
    """A soft gate replaces the clip."""

    kind: Literal["sapo"] = Field("sapo", description=KIND)
    tau_positive: Positive = Field(1.0, description="Sharpness of the gate where the advantage is positive.")
    tau_negative: Positive = Field(1.05, description="Sharpness of the gate where the advantage is negative.")


class TvMask(Primitive):
    """DPPO: masks tokens whose probability has moved too far."""

    kind: Literal["tv_mask"] = Field("tv_mask", description=KIND)
    low: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="Mask a token whose probability fell by more than this.")
    high: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="Mask a token whose probability rose by more than this.")
    cap: Annotated[float, Field(ge=1)] = Field(20.0, description="Upper bound of the ratio.")


class PolicyGradient(Primitive):
    """REINFORCE, without a ratio."""

    kind: Literal["policy_gradient"] = Field("policy_gradient", description=KIND)


PolicyLoss = Annotated[Clip | GeometricMean | Cispo | Sapo | TvMask | PolicyGradient, Field(discriminator="kind")]


class TokenTis(Primitive):
    """Truncated importance weights per token."""

    kind: Literal["token_tis"] = Field("token_tis", description=KIND)
    cap: Annotated[float, Field(ge=1)] = Field(2.0, description="Upper bound of the weight.")


class SequenceTis(Primitive):
    """One truncated importance weight per response."""

    kind: Literal["sequence_tis"] = Field("sequence_tis", description=KIND)
    cap: Annotated[float, Field(ge=1)] = Field(5.0, description="Upper bound of the weight.")


class IcePop(Primitive):
    """Importance weights per token; a weight outside the bounds becomes 0."""

    kind: Literal["icepop"] = Field("icepop", description=KIND)
    low: Fraction = Field(0.5, description="Drop tokens with a lower weight.")
    high: Annotated[float, Field(ge=1)] = Field(5.0, description="Drop tokens with a higher weight.")


class GeometricMask(Primitive):
    """Drops responses whose geometric mean weight is outside the bounds."""

    kind: Literal["geometric_mask"] = Field("geometric_mask", description=KIND)
    low: Fraction = Field(0.99, description="Drop responses with a lower mean weight.")
    high: Annotated[float, Field(ge=1)] = Field(1.01, description="Drop responses with a higher mean weight.")


class Veto(Primitive):
    """Drops responses that have a token weight outside the bounds."""

    kind: Literal["veto"] = Field("veto", description=KIND)
    low: Fraction = Field(1e-4, description="Drop responses that have a token with a lower weight.")
    high: Annotated[float, Field(ge=1)] | None = Field(
        None, description="Drop responses that have a token with a higher weight. null: no bound."
    )


Correction = Annotated[TokenTis | SequenceTis | IcePop | GeometricMask | Veto, Field(discriminator="kind")]


class AdaptiveKl(Primitive):
    """Adapts the coefficient so that the KL stays near the target."""

    target: Positive = Field(6.0, description="Target KL in nats per `unit`.")
    unit: Literal["response", "token"] = Field(
        "response",
        description="What `target` counts. response: the sum over a response's tokens. token: the mean over its tokens, as in"
        " verl and OpenRLHF.",
    )
    horizon: int = Field(10_000, ge=1, description="Number of samples over which the coefficient adapts.")


class Kl(Primitive):
    """The penalty for divergence from the reference policy."""

    place: Literal["reward", "loss"] = Field(description="Whether the penalty is part of the reward or of the loss.")
    estimator: KlEstimator = Field(
        description="Estimator of the divergence. +: the value of the named estimator with the gradient of k2."
    )
    coef: Positive = Field(description="Coefficient of the penalty. With `adaptive`, its initial value.")
    adaptive: AdaptiveKl | None = Field(None, description="Controller of the coefficient. null: the coefficient is constant.")
    renew_interval: int = Field(
        0, ge=0, description="Iterations after which the reference is replaced by the policy. 0: the reference stays version 0."
    )


class Overlong(Primitive):
    """DAPO's soft penalty near the length limit."""

    buffer: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2, description="Final fraction of the length limit over which the penalty grows."
    )
    factor: Positive = Field(1.0, description="Weight of the penalty.")


class Repetition(Primitive):
    """A penalty for n-grams that a response repeats."""

    ngram: int = Field(ge=1, description="Length of the repeated sequences, in tokens.")
    factor: Positive = Field(description="Weight of the penalty.")


class Shaping(Primitive):
    """Changes to a score before the advantages are computed, applied in this order."""

    normalise: bool = Field(False, description="Normalise by the running mean and standard deviation of the run's scores.")
    clip: tuple[float, float] | None = Field(None, description="Lowest and highest score, after normalisation.")
    overlong: Overlong | None = Field(None, description="Penalty that grows near the length limit. null: none.")
    truncation_penalty: float = Field(0.0, ge=0, description="Subtracted from the score of a truncated response.")
    repetition: Repetition | None = Field(None, description="Penalty for repeated n-grams. null: none.")
    truncation_mask: bool = Field(False, description="Do not train on truncated responses.")


class SkipPrompts(Primitive):
    """Skips most prompts whose newest samples were all solved or all unsolved, since these give no gradient."""

    solved_above: float = Field(0.5, description="A sample with a higher score counts as solved.")
    min_samples: int = Field(
        16, ge=1, description="Number of newest samples of a prompt that must agree before it may be skipped."
    )
    always: bool = Field(True, description="Skip prompts whose newest samples were all solved.")
    never: bool = Field(True, description="Skip prompts none of whose newest samples was solved.")
    retry: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="Probability of sampling such a prompt anyway, since the policy changes."
    )


class Recipe(Primitive):
    """An algorithm as data."""

    advantage: AdvantageEstimator = Field(description="Advantage estimator.")
    loss: PolicyLoss = Field(description="Policy loss per token.")
    aggregation: Aggregation = Field("token-mean", description="How token losses are aggregated over the whole optimizer step.")
    anchor: Literal["old", "behaviour"] = Field(
        "old",
        description="Denominator of the ratios. old: the policy before the iteration's first step (decoupled). behaviour: the"
        " sampling policy (bypass).",
    )
    kl: Kl | None = Field(
        None, description="Penalty for divergence from the reference policy. null: no reference model is loaded."
    )
    correction: tuple[Correction, ...] = Field((), description="Off-policy corrections.")
    shaping: Shaping = Field(Shaping(), description="Changes to a score before the advantages are computed.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    teacher_coef: float = Field(0.0, ge=0, description="On-policy distillation: weight of log p_teacher - log p_student.")
    dynamic_sampling: bool = Field(False, description="Drop groups with equal scores and sample others in their place.")
    skip_prompts: SkipPrompts | None = Field(
        None, description="Skip prompts that are always or never solved. null: every prompt is sampled."
    )
