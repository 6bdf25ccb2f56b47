"""A recipe: which primitives an algorithm consists of, and their parameters. Plain data that a configuration file can hold.

Invariant: every parameter is read by the primitive that it belongs to; a parameter that the chosen primitive does not have is
an error.
"""

from typing import Annotated, Literal

from pydantic import Field

from polyreme.config.section import Section

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlEstimator = Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+"]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


KIND = "The name of this primitive."


class Primitive(Section):
    """A part of a recipe."""


class LengthAdaptive(Primitive):
    """VAPO: lam = 1 - 1 / (alpha * tokens) for each response."""

    alpha: Positive = Field(0.05, description="How fast lam rises with the length.")


class Gae(Primitive):
    """Generalised advantage estimation: the only estimator with a critic."""

    kind: Literal["gae"] = Field("gae", description=KIND)
    gamma: Fraction = Field(1.0, description="Discount of later rewards, per token.")
    lam: Fraction | LengthAdaptive = Field(0.95, description="Of the policy's advantages.")
    value_lam: Fraction | None = Field(None, description="Of the critic's returns; none: that of the advantages.")
    bootstrap_truncated: bool = Field(False, description="A response that the length limit cut goes on with the critic's value.")
    whiten: bool = Field(True, description="Shift and scale the advantages of the batch to mean 0 and deviation 1.")
    value_clip: Positive | None = Field(0.5, description="The critic may move its values so far; none: no clip.")


class GroupNorm(Primitive):
    """Score minus the group's mean, divided by the group's standard deviation."""

    kind: Literal["group_norm"] = Field("group_norm", description=KIND)
    std_floor: float = Field(1e-4, ge=0, description="Added to a group's standard deviation.")
    ddof: Literal[0, 1] = Field(1, description="1: the unbiased deviation; 0: that of the group as a population.")


class GroupMean(Primitive):
    """Score minus the group's mean."""

    kind: Literal["group_mean"] = Field("group_mean", description=KIND)
    whiten: bool = Field(False, description="Over the batch; groups of equal scores stay at 0.")


class LeaveOneOut(Primitive):
    """Score minus the mean of the group's others."""

    kind: Literal["leave_one_out"] = Field("leave_one_out", description=KIND)


class Returns(Primitive):
    """Discounted token rewards to go, without a baseline but the batch's."""

    kind: Literal["returns"] = Field("returns", description=KIND)
    gamma: Fraction = Field(1.0, description="Discount of later rewards, per token.")
    whiten: bool = Field(True, description="Shift and scale the advantages of the batch to mean 0 and deviation 1.")


class GreedyBaseline(Primitive):
    """Token rewards to go minus the score of the greedy answer."""

    kind: Literal["greedy_baseline"] = Field("greedy_baseline", description=KIND)


class LengthWeightedBaseline(Primitive):
    """Score minus the group's mean weighted by length."""

    kind: Literal["length_weighted_baseline"] = Field("length_weighted_baseline", description=KIND)


class PerPart(Primitive):
    """Each part of the reward normalised within its group; their weighted sum."""

    kind: Literal["per_part"] = Field("per_part", description=KIND)
    std_floor: float = Field(1e-4, ge=0, description="Added to a group's standard deviation.")
    ddof: Literal[0, 1] = Field(1, description="1: the unbiased deviation. 0: that of the group as a population.")
    whiten: bool = Field(True, description="Over the batch; groups whose parts are all equal stay at 0.")


class Positives(Primitive):
    """1 for an accepted sample, else 0."""

    kind: Literal["positives"] = Field("positives", description=KIND)
    threshold: float = Field(0.0, description="A score above it is accepted.")


class Zero(Primitive):
    """No advantage from the reward: what a pure distillation needs."""

    kind: Literal["zero"] = Field("zero", description=KIND)


AdvantageEstimator = Annotated[
    Gae | GroupNorm | GroupMean | LeaveOneOut | Returns | GreedyBaseline | LengthWeightedBaseline | PerPart | Positives | Zero,
    Field(discriminator="kind"),
]


class Clip(Primitive):
    """PPO's clipped surrogate."""

    kind: Literal["clip"] = Field("clip", description=KIND)
    low: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="The ratio is clipped below 1 - low.")
    high: Positive = Field(0.2, description="The ratio is clipped above 1 + high.")
    dual: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Dual clip: bound on the ratio where the advantage is < 0."
    )
    ratio: Literal["token", "sequence"] = Field("token", description="sequence: the geometric mean over the response (GSPO).")


class GeometricMean(Primitive):
    """The geometric mean of clipped ratios (GMPO)."""

    kind: Literal["geometric_mean"] = Field("geometric_mean", description=KIND)
    low: Positive = Field(0.4, description="Of the log-ratio.")
    high: Positive = Field(0.4, description="Of the log-ratio.")


class Cispo(Primitive):
    """The clipped ratio as a weight, every token keeps its gradient."""

    kind: Literal["cispo"] = Field("cispo", description=KIND)
    low: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="1: no lower bound.")
    high: Positive = Field(4.0, description="The ratio as a weight is at most 1 + high.")


class Sapo(Primitive):
    """A soft gate instead of a clip."""

    kind: Literal["sapo"] = Field("sapo", description=KIND)
    tau_positive: Positive = Field(1.0, description="Sharpness of the gate where the advantage is > 0.")
    tau_negative: Positive = Field(1.05, description="Sharpness of the gate where the advantage is < 0.")


class TvMask(Primitive):
    """DPPO: tokens whose probability has moved too far are masked."""

    kind: Literal["tv_mask"] = Field("tv_mask", description=KIND)
    low: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="A token whose probability fell by more is masked.")
    high: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="A token whose probability rose by more is masked.")
    cap: Annotated[float, Field(ge=1)] = Field(20.0, description="Largest ratio.")


class PolicyGradient(Primitive):
    """REINFORCE: no ratio at all."""

    kind: Literal["policy_gradient"] = Field("policy_gradient", description=KIND)


PolicyLoss = Annotated[Clip | GeometricMean | Cispo | Sapo | TvMask | PolicyGradient, Field(discriminator="kind")]


class TokenTis(Primitive):
    """Truncated importance weights per token."""

    kind: Literal["token_tis"] = Field("token_tis", description=KIND)
    cap: Annotated[float, Field(ge=1)] = Field(2.0, description="Largest weight.")


class SequenceTis(Primitive):
    """One truncated importance weight per response."""

    kind: Literal["sequence_tis"] = Field("sequence_tis", description=KIND)
    cap: Annotated[float, Field(ge=1)] = Field(5.0, description="Largest weight.")


class IcePop(Primitive):
    """Importance weights per token within bounds, 0 outside."""

    kind: Literal["icepop"] = Field("icepop", description=KIND)
    low: Fraction = Field(0.5, description="Weights below it are dropped.")
    high: Annotated[float, Field(ge=1)] = Field(5.0, description="Weights above it are dropped.")


class GeometricMask(Primitive):
    """Responses whose geometric mean weight is out of bounds are dropped."""

    kind: Literal["geometric_mask"] = Field("geometric_mask", description=KIND)
    low: Fraction = Field(0.99, description="Weights below it are dropped.")
    high: Annotated[float, Field(ge=1)] = Field(1.01, description="Weights above it are dropped.")


class Veto(Primitive):
    """Responses with one token out of bounds are dropped."""

    kind: Literal["veto"] = Field("veto", description=KIND)
    low: Fraction = Field(1e-4, description="Weights below it are dropped.")
    high: Annotated[float, Field(ge=1)] | None = Field(None, description="Weights above it are dropped.")


Correction = Annotated[TokenTis | SequenceTis | IcePop | GeometricMask | Veto, Field(discriminator="kind")]


class AdaptiveKl(Primitive):
    """Moves the coefficient so that the KL of a response stays near the target."""

    target: Positive = Field(6.0, description="Nats per response.")
    horizon: int = Field(10_000, ge=1, description="Samples over which the coefficient follows.")


class Kl(Primitive):
    """The penalty for leaving the reference policy."""

    place: Literal["reward", "loss"] = Field(description="Where the penalty acts: on the reward, or on the loss.")
    estimator: KlEstimator = Field(description="Estimator of the divergence; + takes the value of one and the gradient of k2.")
    coef: Positive = Field(description="With a controller: of the first iteration.")
    adaptive: AdaptiveKl | None = Field(None, description="Controller that moves the coefficient; null: it stays.")
    renew_interval: int = Field(
        0, ge=0, description="Iterations after which the reference becomes the policy. 0: it stays version 0."
    )


class Overlong(Primitive):
    """DAPO's soft penalty near the longest response."""

    buffer: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="Fraction of the longest response over which it grows.")
    factor: Positive = Field(1.0, description="Weight of the penalty.")


class Repetition(Primitive):
    """A penalty for n-grams that a response repeats."""

    ngram: int = Field(ge=1, description="Length of the repeated sequences, in tokens.")
    factor: Positive = Field(description="Weight of the penalty.")


class Shaping(Primitive):
    """What happens to a score before advantages are made of it, in this order."""

    normalise: bool = Field(False, description="By the running mean and deviation of the run's scores.")
    clip: tuple[float, float] | None = Field(None, description="Lowest and highest score, after normalisation.")
    overlong: Overlong | None = Field(None, description="Penalty that grows near the longest response; null: none.")
    truncation_penalty: float = Field(0.0, ge=0, description="Taken off the score of a response that the length limit cut.")
    repetition: Repetition | None = Field(None, description="Penalty for repeated n-grams; null: none.")
    truncation_mask: bool = Field(False, description="Responses that the length limit cut are not trained on.")


class SkipPrompts(Primitive):
    """Prompts whose samples were lately all solved, or all not, are mostly left out: they teach nothing."""

    solved_above: float = Field(0.5, description="A sample with a higher score counts as solved.")
    min_samples: int = Field(16, ge=1, description="Newest samples of a prompt that must agree before it may be skipped.")
    always: bool = Field(True, description="Skip prompts whose newest samples were all solved.")
    never: bool = Field(True, description="Skip prompts none of whose newest samples was solved.")
    retry: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="Probability with which such a prompt is sampled nevertheless, since the policy changes."
    )


class Recipe(Primitive):
    """An algorithm as data."""

    advantage: AdvantageEstimator = Field(description="Estimator of the advantages.")
    loss: PolicyLoss = Field(description="The policy loss of a token.")
    aggregation: Aggregation = Field(
        "token-mean", description="How token losses become one number, over the whole optimizer step."
    )
    anchor: Literal["old", "behaviour"] = Field(
        "old",
        description="What ratios are measured from: the policy before the iteration's first step (decoupled), or the sampler itself (bypass).",
    )
    kl: Kl | None = Field(None, description="Penalty for leaving the reference policy; null: no reference model is loaded.")
    correction: tuple[Correction, ...] = Field((), description="Corrections for samples of another policy.")
    shaping: Shaping = Field(Shaping(), description="Changes to a score before advantages are made of it.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")
    teacher_coef: float = Field(0.0, ge=0, description="On-policy distillation: weight of log p_teacher - log p_student.")
    dynamic_sampling: bool = Field(False, description="Groups of equal scores are dropped and others are sampled instead.")
    skip_prompts: SkipPrompts | None = Field(
        None, description="Prompts that are always or never solved are left out; null: every prompt is sampled."
    )
