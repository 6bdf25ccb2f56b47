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


class Primitive(Section):
    """A part of a recipe."""


class LengthAdaptive(Primitive):
    """VAPO: lam = 1 - 1 / (alpha * tokens) for each response."""

    alpha: Positive = 0.05


class Gae(Primitive):
    """Generalised advantage estimation: the only estimator with a critic."""

    kind: Literal["gae"] = "gae"
    gamma: Fraction = 1.0
    lam: Fraction | LengthAdaptive = Field(0.95, description="Of the policy's advantages.")
    value_lam: Fraction | None = Field(None, description="Of the critic's returns; none: that of the advantages.")
    bootstrap_truncated: bool = Field(False, description="A response that the length limit cut goes on with the critic's value.")
    whiten: bool = True
    value_clip: Positive | None = Field(0.5, description="The critic may move its values so far; none: no clip.")


class GroupNorm(Primitive):
    """Score minus the group's mean, divided by the group's standard deviation."""

    kind: Literal["group_norm"] = "group_norm"
    std_floor: float = Field(1e-4, ge=0)
    ddof: Literal[0, 1] = Field(1, description="1: the unbiased deviation; 0: that of the group as a population.")


class GroupMean(Primitive):
    """Score minus the group's mean."""

    kind: Literal["group_mean"] = "group_mean"
    whiten: bool = Field(False, description="Over the batch; groups of equal scores stay at 0.")


class LeaveOneOut(Primitive):
    """Score minus the mean of the group's others."""

    kind: Literal["leave_one_out"] = "leave_one_out"


class Returns(Primitive):
    """Discounted token rewards to go, without a baseline but the batch's."""

    kind: Literal["returns"] = "returns"
    gamma: Fraction = 1.0
    whiten: bool = True


class GreedyBaseline(Primitive):
    """Token rewards to go minus the score of the greedy answer."""

    kind: Literal["greedy_baseline"] = "greedy_baseline"


class LengthWeightedBaseline(Primitive):
    """Score minus the group's mean weighted by length."""

    kind: Literal["length_weighted_baseline"] = "length_weighted_baseline"


class PerPart(Primitive):
    """Each part of the reward normalised within its group; their weighted sum."""

    kind: Literal["per_part"] = "per_part"
    std_floor: float = Field(1e-4, ge=0)
    ddof: Literal[0, 1] = 1
    whiten: bool = Field(True, description="Over the batch; groups whose parts are all equal stay at 0.")


class Positives(Primitive):
    """1 for an accepted sample, else 0."""

    kind: Literal["positives"] = "positives"
    threshold: float = Field(0.0, description="A score above it is accepted.")


class Zero(Primitive):
    """No advantage from the reward: what a pure distillation needs."""

    kind: Literal["zero"] = "zero"


AdvantageEstimator = Annotated[
    Gae | GroupNorm | GroupMean | LeaveOneOut | Returns | GreedyBaseline | LengthWeightedBaseline | PerPart | Positives | Zero,
    Field(discriminator="kind"),
]


class Clip(Primitive):
    """PPO's clipped surrogate."""

    kind: Literal["clip"] = "clip"
    low: Annotated[float, Field(gt=0, le=1)] = 0.2
    high: Positive = 0.2
    dual: Annotated[float, Field(gt=1)] | None = Field(
        None, description="Dual clip: bound on the ratio where the advantage is < 0."
    )
    ratio: Literal["token", "sequence"] = Field("token", description="sequence: the geometric mean over the response (GSPO).")


class GeometricMean(Primitive):
    """The geometric mean of clipped ratios (GMPO)."""

    kind: Literal["geometric_mean"] = "geometric_mean"
    low: Positive = Field(0.4, description="Of the log-ratio.")
    high: Positive = Field(0.4, description="Of the log-ratio.")


class Cispo(Primitive):
    """The clipped ratio as a weight, every token keeps its gradient."""

    kind: Literal["cispo"] = "cispo"
    low: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="1: no lower bound.")
    high: Positive = 4.0


class Sapo(Primitive):
    """A soft gate instead of a clip."""

    kind: Literal["sapo"] = "sapo"
    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05


class TvMask(Primitive):
    """DPPO: tokens whose probability has moved too far are masked."""

    kind: Literal["tv_mask"] = "tv_mask"
    low: Annotated[float, Field(gt=0, le=1)] = 0.2
    high: Annotated[float, Field(gt=0, le=1)] = 0.2
    cap: Annotated[float, Field(ge=1)] = Field(20.0, description="Largest ratio.")


class PolicyGradient(Primitive):
    """REINFORCE: no ratio at all."""

    kind: Literal["policy_gradient"] = "policy_gradient"


PolicyLoss = Annotated[Clip | GeometricMean | Cispo | Sapo | TvMask | PolicyGradient, Field(discriminator="kind")]


class TokenTis(Primitive):
    """Truncated importance weights per token."""

    kind: Literal["token_tis"] = "token_tis"
    cap: Annotated[float, Field(ge=1)] = 2.0


class SequenceTis(Primitive):
    """One truncated importance weight per response."""

    kind: Literal["sequence_tis"] = "sequence_tis"
    cap: Annotated[float, Field(ge=1)] = 5.0


class IcePop(Primitive):
    """Importance weights per token within bounds, 0 outside."""

    kind: Literal["icepop"] = "icepop"
    low: Fraction = 0.5
    high: Annotated[float, Field(ge=1)] = 5.0


class GeometricMask(Primitive):
    """Responses whose geometric mean weight is out of bounds are dropped."""

    kind: Literal["geometric_mask"] = "geometric_mask"
    low: Fraction = 0.99
    high: Annotated[float, Field(ge=1)] = 1.01


class Veto(Primitive):
    """Responses with one token out of bounds are dropped."""

    kind: Literal["veto"] = "veto"
    low: Fraction = 1e-4
    high: Annotated[float, Field(ge=1)] | None = None


Correction = Annotated[TokenTis | SequenceTis | IcePop | GeometricMask | Veto, Field(discriminator="kind")]


class AdaptiveKl(Primitive):
    """Moves the coefficient so that the KL of a response stays near the target."""

    target: Positive = Field(6.0, description="Nats per response.")
    horizon: int = Field(10_000, ge=1, description="Samples over which the coefficient follows.")


class Kl(Primitive):
    """The penalty for leaving the reference policy."""

    place: Literal["reward", "loss"]
    estimator: KlEstimator
    coef: Positive = Field(description="With a controller: of the first iteration.")
    adaptive: AdaptiveKl | None = None


class Overlong(Primitive):
    """DAPO's soft penalty near the longest response."""

    buffer: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="Fraction of the longest response over which it grows.")
    factor: Positive = 1.0


class Repetition(Primitive):
    """A penalty for n-grams that a response repeats."""

    ngram: int = Field(ge=1)
    factor: Positive


class Shaping(Primitive):
    """What happens to a score before advantages are made of it, in this order."""

    normalise: bool = Field(False, description="By the running mean and deviation of the run's scores.")
    clip: tuple[float, float] | None = Field(None, description="Lowest and highest score, after normalisation.")
    overlong: Overlong | None = None
    truncation_penalty: float = Field(0.0, ge=0, description="Taken off the score of a response that the length limit cut.")
    repetition: Repetition | None = None
    truncation_mask: bool = Field(False, description="Responses that the length limit cut are not trained on.")


class Recipe(Primitive):
    """An algorithm as data."""

    advantage: AdvantageEstimator
    loss: PolicyLoss
    aggregation: Aggregation = "token-mean"
    anchor: Literal["old", "behaviour"] = Field(
        "old",
        description="What ratios are measured from: the policy before the iteration's first step (decoupled), or the sampler itself (bypass).",
    )
    kl: Kl | None = None
    correction: tuple[Correction, ...] = ()
    shaping: Shaping = Shaping()
    entropy_coef: float = Field(0.0, ge=0)
    teacher_coef: float = Field(0.0, ge=0, description="On-policy distillation: weight of log p_teacher - log p_student.")
    dynamic_sampling: bool = Field(False, description="Groups of equal scores are dropped and others are sampled instead.")
