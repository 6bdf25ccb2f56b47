"""Named algorithms, and the resolution of a name and overrides to a recipe.

Invariant: an override changes the overridden parameters of a preset's recipe and nothing else. A primitive that is replaced by
one of another kind starts from the defaults of that kind.
"""

import difflib
from collections.abc import Mapping

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from polyreme.config.recipes.recipe import (
    Cispo,
    Clip,
    Correction,
    Gae,
    GreedyBaseline,
    GroupMean,
    GroupNorm,
    Kl,
    LeaveOneOut,
    LengthWeightedBaseline,
    Overlong,
    PerPart,
    PolicyGradient,
    Positives,
    Recipe,
    Returns,
    Sapo,
    Shaping,
    TokenTis,
    TvMask,
    Zero,
)
from polyreme.config.upgrade import OLD_KEYS, REWRITE
from polyreme.errors import ConfigError

PAPER_NORM = GroupNorm(std_floor=1e-6)

PRESETS: Mapping[str, Recipe] = {
    # Schulman et al. 2017 (arXiv 1707.06347); with the KL in the reward as in Ouyang et al. 2022 (arXiv 2203.02155).
    "ppo": Recipe(advantage=Gae(), loss=Clip(), kl=Kl(place="reward", estimator="k1", coef=0.02)),
    # Shao et al. 2024 (arXiv 2402.03300).
    "grpo": Recipe(
        advantage=PAPER_NORM, loss=Clip(), aggregation="seq-mean-token-mean", kl=Kl(place="loss", estimator="k3", coef=0.04)
    ),
    # Liu et al. 2025 (arXiv 2503.20783).
    "dr_grpo": Recipe(advantage=GroupMean(), loss=Clip(), aggregation="seq-mean-token-sum-norm"),
    # Yu et al. 2025 (arXiv 2503.14476).
    "dapo": Recipe(advantage=PAPER_NORM, loss=Clip(high=0.28), shaping=Shaping(overlong=Overlong()), dynamic_sampling=True),
    # Ahmadian et al. 2024 (arXiv 2402.14740): a response is one action. With one step per iteration the clip is inactive.
    "rloo": Recipe(
        advantage=LeaveOneOut(), loss=Clip(), aggregation="seq-mean-token-sum", kl=Kl(place="reward", estimator="k1", coef=0.02)
    ),
    # Hu et al. 2025 (arXiv 2501.03262), and its variant with the group mean as baseline.
    "reinforce_pp": Recipe(advantage=Returns(), loss=Clip(), kl=Kl(place="reward", estimator="k1", coef=0.01)),
    "reinforce_pp_baseline": Recipe(
        advantage=GroupMean(whiten=True), loss=Clip(), kl=Kl(place="loss", estimator="k2", coef=0.001)
    ),
    # Zheng et al. 2025 (arXiv 2507.18071).
    "gspo": Recipe(advantage=PAPER_NORM, loss=Clip(low=3e-4, high=4e-4, ratio="sequence"), aggregation="seq-mean-token-mean"),
    # MiniMax 2025 (arXiv 2506.13585).
    "cispo": Recipe(advantage=PAPER_NORM, loss=Cispo()),
    # Gao et al. 2025 (arXiv 2511.20347).
    "sapo": Recipe(advantage=PAPER_NORM, loss=Sapo(), aggregation="seq-mean-token-mean"),
    # Qi et al. 2026 (arXiv 2602.04879): the trust region is around the sampling policy.
    "dppo_tv": Recipe(advantage=PAPER_NORM, loss=TvMask(), anchor="behaviour"),
    # Liu et al. 2026 (arXiv 2601.05242).
    "gdpo": Recipe(advantage=PerPart(std_floor=1e-6), loss=Clip()),
    # Li et al. 2023 (arXiv 2310.10505).
    "remax": Recipe(advantage=GreedyBaseline(), loss=PolicyGradient()),
    # Hao et al. 2025 (arXiv 2505.23585): exactly on-policy.
    "opo": Recipe(advantage=LengthWeightedBaseline(), loss=PolicyGradient()),
    # Dong et al. 2023 (arXiv 2304.06767): imitation of what the reward accepts.
    "raft": Recipe(advantage=Positives(), loss=PolicyGradient()),
    # Agarwal et al. 2023 (arXiv 2306.13649), only on the policy's samples, by the policy gradient of the reverse KL to a teacher.
    "distillation": Recipe(advantage=Zero(), loss=Clip(), teacher_coef=1.0),
}

SEQUENCE_PRESETS = frozenset({"gspo"})
"""Presets that are defined by one ratio per response. With a ratio per token they would be another algorithm."""

STANDARD_CORRECTION: tuple[Correction, ...] = (TokenTis(cap=2.0),)
"""Default correction when engine and learner round differently (bfloat16) or samples are stale. A geometric mask in addition
would drop most samples of an asynchronous run, whose policies differ by more than rounding."""


def resolve(preset: str, overrides: Mapping[str, object]) -> Recipe:
    """The preset's recipe with `overrides` applied, a tree of plain values such as `{"loss": {"high": 0.28}, "kl": None}`.

    Raises:
        ConfigError: the preset is unknown, no primitive reads a key, or a value is invalid.
    """
    if preset not in PRESETS:
        raise ConfigError(f"one of the algorithms {', '.join(PRESETS)}", repr(preset), _nearest(preset, list(PRESETS)))
    tree = _merge(PRESETS[preset].model_dump(), overrides)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        problems = "; ".join(_explain(problem) for problem in error.errors())
        raise ConfigError(f"parameters of {preset}", problems, "Fix these keys.") from None
    if preset in SEQUENCE_PRESETS and not (isinstance(recipe.loss, Clip) and recipe.loss.ratio == "sequence"):
        level = recipe.loss.ratio if isinstance(recipe.loss, Clip) else recipe.loss.kind
        raise ConfigError(
            f"one ratio per response, which defines {preset}",
            f"loss: {level}",
            "Use preset grpo, or do not override loss.kind and loss.ratio.",
        )
    return recipe


def _merge(base: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """Merges `overrides` into `base` key by key. A primitive of another kind replaces the whole primitive of the base."""
    merged = dict(base)
    for key, value in overrides.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and value.get("kind", old.get("kind")) == old.get("kind"):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _explain(problem: ErrorDetails) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden" and (old := f"algorithm.{problem['loc'][0]}.{problem['loc'][-1]}") in OLD_KEYS:
        return f"old key {old} ({REWRITE})"
    if problem["type"] == "extra_forbidden":
        return f"{where}, which no primitive reads"
    return f"{where}: {problem['msg']}, found {problem['input']!r:.80}"


def _nearest(word: str, words: list[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f"Did you mean {near[0]}?" if near else "Choose one of these."
