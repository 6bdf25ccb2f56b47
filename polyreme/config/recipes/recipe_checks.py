"""Refuses combinations of primitives that make no sense, before anything starts.

Invariant: every error states why the combination cannot be intended.
"""

from collections.abc import Iterator

from polyreme.config.recipes.recipe import (
    Clip,
    GeometricMean,
    IcePop,
    PolicyGradient,
    Recipe,
    SequenceTis,
    Shaping,
    TokenTis,
    TvMask,
    Zero,
)
from polyreme.errors import ConfigError

WEIGHTS = (TokenTis, SequenceTis, IcePop)


def check(recipe: Recipe, group_size: int, steps: int, critic: bool) -> None:
    """Refuses a recipe that makes no sense in this run.

    Args:
        recipe: the resolved recipe.
        group_size: samples per prompt.
        steps: optimizer steps per iteration, over all epochs and mini-batches.
        critic: whether the run configures a critic. Without settings, the critic of `gae` starts from the actor.

    Raises:
        ConfigError: describes the first invalid combination.
    """
    for found in (
        *_advantage(recipe, group_size, critic),
        *_ratio(recipe, steps),
        *_correction(recipe),
        *_kl(recipe),
        *_shaping(recipe),
    ):
        raise found


def _advantage(recipe: Recipe, group_size: int, critic: bool) -> Iterator[ConfigError]:
    kind = recipe.advantage.kind
    if recipe.advantage.compares_samples and group_size < 2:
        yield ConfigError(
            f"at least two samples per prompt for advantage {kind}, which compares the samples of a group",
            f"group_size {group_size}",
            "Raise group_size, or choose gae or returns, which need no group.",
        )
    if critic and not recipe.advantage.needs_critic:
        yield ConfigError(
            "no trainer.critic, since only advantage gae has a critic",
            f"trainer.critic with advantage {kind}",
            "Remove trainer.critic (on the command line: trainer.critic={}), or use preset ppo.",
        )
    if isinstance(recipe.advantage, Zero) and recipe.teacher_coef == 0:
        yield ConfigError("a learning signal", "advantage zero without teacher_coef", "Set teacher_coef, or choose an estimator.")
    if recipe.dynamic_sampling and recipe.advantage.learns_from_equal:
        yield ConfigError(
            "an estimator that compares the scores of a group and learns nothing from equal ones",
            f"dynamic_sampling with advantage {kind}, which can learn from them",
            "Turn dynamic_sampling off.",
        )
    if recipe.skip_prompts is not None and not (recipe.skip_prompts.always or recipe.skip_prompts.never):
        yield ConfigError(
            "skip_prompts that skips something", "always: false and never: false", "Set one of them, or skip_prompts: null."
        )
    if recipe.dynamic_sampling and recipe.teacher_coef > 0:
        yield ConfigError(
            "all groups, since distillation needs no scores",
            "dynamic_sampling, which drops groups according to their scores",
            "Turn dynamic_sampling off.",
        )


def _ratio(recipe: Recipe, steps: int) -> Iterator[ConfigError]:
    loss = recipe.loss
    sequence = isinstance(loss, GeometricMean) or (isinstance(loss, Clip) and loss.ratio == "sequence")
    if sequence and recipe.advantage.per_token:
        yield ConfigError(
            "one advantage per response for a loss with one ratio per response",
            f"advantage {recipe.advantage.kind}, whose advantages differ within a response",
            "Use an estimator that compares samples, or loss.ratio: token.",
        )
    if sequence and recipe.teacher_coef > 0:
        yield ConfigError(
            "one advantage per response for a loss with one ratio per response",
            "distillation, which has one advantage per token",
            "Use a loss with a ratio per token.",
        )
    if sequence and recipe.aggregation != "seq-mean-token-mean":
        yield ConfigError(
            "aggregation seq-mean-token-mean for a loss with one ratio per response, so that length does not weight the response",
            recipe.aggregation,
            "Set aggregation: seq-mean-token-mean.",
        )
    if isinstance(loss, Clip) and loss.dual is not None and loss.dual <= 1 + loss.high:
        yield ConfigError(
            "a dual clip above 1 + high, since it applies outside the clip range", f"dual {loss.dual}", "Raise it; 3 is usual."
        )
    if isinstance(loss, TvMask) and recipe.anchor != "behaviour":
        yield ConfigError(
            "anchor: behaviour for loss tv_mask, whose trust region is around the sampling policy",
            recipe.anchor,
            "Set anchor: behaviour.",
        )
    if isinstance(loss, PolicyGradient) and recipe.anchor == "behaviour":
        yield ConfigError("no anchor for loss policy_gradient, which has no ratio", "anchor: behaviour", "Remove anchor.")
    if isinstance(loss, PolicyGradient) and steps > 1:
        yield ConfigError(
            "one optimizer step per iteration for loss policy_gradient, which has no ratio to correct later steps",
            f"{steps} steps",
            "Set minibatches and epochs to 1, or use a loss with a ratio.",
        )


def _correction(recipe: Recipe) -> Iterator[ConfigError]:
    kinds = [correction.kind for correction in recipe.correction]
    weights = [correction.kind for correction in recipe.correction if isinstance(correction, WEIGHTS)]
    if len(weights) > 1:
        yield ConfigError(
            "one importance weight, since all of them correct the same difference", " and ".join(weights), "Keep one of them."
        )
    if len(set(kinds)) < len(kinds):
        yield ConfigError("each mask once", " and ".join(kinds), "Keep one of each.")
    if kinds and recipe.anchor == "behaviour":
        yield ConfigError(
            "no correction with anchor: behaviour, whose ratio is already relative to the sampling policy",
            " and ".join(kinds),
            "Remove the correction, or set anchor: old.",
        )


def _kl(recipe: Recipe) -> Iterator[ConfigError]:
    kl = recipe.kl
    if kl is None:
        return
    if kl.place == "reward" and kl.estimator.endswith("+"):
        yield ConfigError(
            "an estimator without + in the reward, which carries no gradient", kl.estimator, f"Use {kl.estimator[:-1]}."
        )
    if kl.place == "loss" and kl.adaptive is not None:
        yield ConfigError(
            "a constant coefficient for the KL in the loss, since the controller needs the KL before the step",
            "adaptive",
            "Remove kl.adaptive, or set kl.place: reward.",
        )
    if kl.place == "loss" and kl.estimator == "k1":
        yield ConfigError(
            "an estimator whose gradient estimates the gradient of the KL",
            "k1 in the loss, whose gradient is 0 in expectation",
            "Use k2, k3 or k1+.",
        )
    if kl.place == "reward" and not recipe.advantage.reads_score:
        yield ConfigError(
            f"the KL in the loss with advantage {recipe.advantage.kind}, which does not read the reward",
            "kl.place: reward",
            "Set kl.place: loss.",
        )


def _shaping(recipe: Recipe) -> Iterator[ConfigError]:
    shaping = recipe.shaping
    if shaping.clip is not None and shaping.clip[0] >= shaping.clip[1]:
        yield ConfigError("a lowest score below the highest", f"shaping.clip {list(shaping.clip)}", "Swap them.")
    idle = Shaping(truncation_mask=shaping.truncation_mask)
    if not recipe.advantage.reads_score and shaping != idle:
        yield ConfigError(
            f"no shaping with advantage {recipe.advantage.kind}, which does not read the score",
            "shaping",
            "Move the shaping into the reward, or remove it.",
        )
