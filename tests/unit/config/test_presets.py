"""Presets and overrides, and the combinations that are refused: each error says why."""

from typing import Any

import pytest

from polyreme.config.presets import PRESETS, STANDARD_CORRECTION, resolve
from polyreme.config.recipe import Clip, Gae, GroupMean, GroupNorm, Recipe, Sapo
from polyreme.config.recipe_checks import check
from polyreme.errors import ConfigError

NAMES = [
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "gspo",
    "cispo",
    "sapo",
    "dppo_tv",
    "gdpo",
    "remax",
    "opo",
    "raft",
]


def test_every_preset_is_there_and_makes_sense() -> None:
    assert list(PRESETS) == NAMES
    for name in NAMES:
        recipe = resolve(name, {})
        assert recipe == PRESETS[name]
        check(recipe, group_size=2, steps=1, critic=isinstance(recipe.advantage, Gae))


def test_a_recipe_survives_plain_values() -> None:
    for recipe in PRESETS.values():
        assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_overrides_change_what_they_name_only() -> None:
    recipe = resolve("grpo", {"loss": {"high": 0.28}, "kl": None, "advantage": {"std_floor": 1e-4}})
    expected = PRESETS["grpo"].model_copy(
        update={"loss": Clip(low=0.2, high=0.28), "kl": None, "advantage": GroupNorm(std_floor=1e-4)}
    )
    assert recipe == expected


def test_a_primitive_of_another_kind_starts_from_its_own_defaults() -> None:
    recipe = resolve("dapo", {"loss": {"kind": "sapo"}, "advantage": {"kind": "group_mean", "whiten": True}})
    assert recipe.loss == Sapo()
    assert recipe.advantage == GroupMean(whiten=True)
    assert recipe.shaping == PRESETS["dapo"].shaping


def test_sections_that_a_preset_lacks_can_be_added() -> None:
    recipe = resolve(
        "dr_grpo",
        {
            "kl": {"place": "reward", "estimator": "k1", "coef": 0.1, "adaptive": {"target": 3}},
            "shaping": {"overlong": {"factor": 2}, "repetition": {"ngram": 4, "factor": 1}},
            "correction": [correction.model_dump() for correction in STANDARD_CORRECTION],
        },
    )
    assert recipe.kl is not None and recipe.kl.adaptive is not None and recipe.kl.adaptive.target == 3
    assert recipe.shaping.overlong is not None and recipe.shaping.overlong.factor == 2
    assert recipe.correction == STANDARD_CORRECTION
    check(recipe, group_size=4, steps=2, critic=False)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as error:
        resolve("grop", {})
    assert error.value.do == "Did you mean grpo?"


@pytest.mark.parametrize(
    ("preset", "overrides", "key"),
    [
        ("grpo", {"loss": {"tau_positive": 2.0}}, "loss.clip.tau_positive"),  # a parameter of another kind
        ("grpo", {"advantage": {"gamma": 0.9}}, "advantage.group_norm.gamma"),
        ("grpo", {"clip": 0.2}, "clip"),
        ("grpo", {"loss": {"low": -1}}, "loss.clip.low"),
        ("ppo", {"advantage": {"lam": 1.5}}, "advantage.gae.lam"),
        ("ppo", {"kl": {"coef": 0}}, "kl.coef"),
        ("ppo", {"kl": {"coef": float("nan")}}, "kl.coef"),
        ("ppo", {"aggregation": "mean"}, "aggregation"),
        ("ppo", {"loss": {"kind": "gpso"}}, "loss"),
    ],
)
def test_values_that_do_not_fit_are_refused(preset: str, overrides: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(preset, overrides)
    assert error.value.found.startswith(key)


@pytest.mark.parametrize("loss", [{"ratio": "token"}, {"kind": "cispo"}, {"kind": "geometric_mean"}])
def test_gspo_has_the_ratio_of_whole_responses(loss: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve("gspo", {"loss": loss})
    assert "gspo" in error.value.expected


TIS, ICEPOP, VETO = {"kind": "token_tis"}, {"kind": "icepop"}, {"kind": "veto"}
REWARD_KL = {"place": "reward", "estimator": "k1", "coef": 0.1}
SEQUENCE = {"loss": {"ratio": "sequence"}, "aggregation": "seq-mean-token-mean"}


@pytest.mark.parametrize(
    ("preset", "overrides", "arguments", "why"),
    [
        ("grpo", {}, {"group_size": 1}, "compares them with one another"),
        ("gdpo", {}, {"group_size": 1}, "compares them with one another"),
        ("opo", {}, {"group_size": 1}, "compares them with one another"),
        ("ppo", {}, {"critic": False}, "made of its values"),
        ("grpo", {}, {"critic": True}, "only advantage gae reads"),
        ("grpo", {"advantage": {"kind": "zero"}}, {}, "something to learn from"),
        ("raft", {"dynamic_sampling": True}, {}, "equal scores teach nothing"),
        ("gdpo", {"dynamic_sampling": True}, {}, "equal scores teach nothing"),
        ("dapo", {"teacher_coef": 1.0}, {}, "needs no scores"),
        ("reinforce_pp", {**SEQUENCE, "kl": None}, {}, "one advantage per response"),
        ("gspo", {"teacher_coef": 1.0}, {}, "one advantage per response"),
        ("gspo", {"aggregation": "token-mean"}, {}, "count by its length"),
        ("dapo", {"loss": {"kind": "geometric_mean"}}, {}, "count by its length"),
        ("dapo", {"loss": {"dual": 1.1}}, {}, "bounds what the clip leaves"),
        ("dppo_tv", {"anchor": "old"}, {}, "around the sampler"),
        ("opo", {"anchor": "behaviour"}, {}, "has no ratio"),
        ("opo", {}, {"steps": 2}, "the first has changed"),
        ("grpo", {"correction": [TIS, ICEPOP]}, {}, "corrects the same difference"),
        ("grpo", {"correction": [TIS, {"kind": "sequence_tis"}]}, {}, "corrects the same difference"),
        ("grpo", {"correction": [VETO, VETO]}, {}, "each mask once"),
        ("grpo", {"correction": [TIS], "anchor": "behaviour"}, {}, "already that to the sampler"),
        ("dppo_tv", {"correction": [TIS]}, {}, "already that to the sampler"),
        ("reinforce_pp", {"kl": {"estimator": "k3+"}}, {}, "no gradient flows"),
        ("grpo", {"kl": {"adaptive": {}}}, {}, "before the step"),
        ("grpo", {"kl": {"estimator": "k1"}}, {}, "gradient is one of the KL"),
        ("gdpo", {"kl": REWARD_KL}, {}, "does not read the reward"),
        ("gdpo", {"shaping": {"overlong": {}}}, {}, "does not read it"),
        ("grpo", {"shaping": {"clip": [1, -1]}}, {}, "lowest score before"),
    ],
)
def test_combinations_without_sense_are_refused(
    preset: str, overrides: dict[str, Any], arguments: dict[str, Any], why: str
) -> None:
    recipe = resolve(preset, overrides)
    sound = {"group_size": 4, "steps": 1, "critic": isinstance(recipe.advantage, Gae)}
    with pytest.raises(ConfigError) as error:
        check(recipe, **{**sound, **arguments})
    assert why in error.value.expected or why in error.value.found


def test_what_is_sound_is_not_refused() -> None:
    for preset, overrides in (
        ("grpo", {"correction": [TIS, {"kind": "geometric_mask"}, VETO]}),
        ("gdpo", {"shaping": {"truncation_mask": True}}),
        ("grpo", {"advantage": {"kind": "zero"}, "teacher_coef": 1.0, "kl": None}),
        ("dapo", {**SEQUENCE}),
        ("dapo", {"loss": {"kind": "geometric_mean"}, "aggregation": "seq-mean-token-mean"}),
        ("grpo", {"anchor": "behaviour"}),
    ):
        check(resolve(preset, overrides), group_size=2, steps=4, critic=False)
    check(resolve("remax", {}), group_size=1, steps=1, critic=False)
    check(resolve("ppo", {}), group_size=1, steps=8, critic=True)
