"""Presets, overrides, and combinations that are refused with a reason."""

from typing import Any

import pytest

from polyreme.config.recipes.presets import PRESETS, STANDARD_CORRECTION, resolve
from polyreme.config.recipes.recipe import Clip, GroupMean, GroupNorm, Recipe, Sapo
from polyreme.config.recipes.recipe_checks import check
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
    "distillation",
]


def test_every_preset_is_there_and_makes_sense() -> None:
    assert list(PRESETS) == NAMES
    for name in NAMES:
        recipe = resolve(name, {})
        assert recipe == PRESETS[name]
        check(recipe, group_size=2, steps=1, critic=False)


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
def test_invalid_values_are_refused(preset: str, overrides: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(preset, overrides)
    assert error.value.found.startswith(key)


@pytest.mark.parametrize("loss", [{"ratio": "token"}, {"kind": "cispo"}, {"kind": "geometric_mean"}])
def test_gspo_requires_one_ratio_per_response(loss: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve("gspo", {"loss": loss})
    assert "gspo" in error.value.expected


TIS, ICEPOP, VETO = {"kind": "token_tis"}, {"kind": "icepop"}, {"kind": "veto"}
REWARD_KL = {"place": "reward", "estimator": "k1", "coef": 0.1}
SEQUENCE = {"loss": {"ratio": "sequence"}, "aggregation": "seq-mean-token-mean"}


@pytest.mark.parametrize(
    ("preset", "overrides", "arguments", "found"),
    [
        ("grpo", {}, {"group_size": 1}, "group_size 1"),
        ("gdpo", {}, {"group_size": 1}, "group_size 1"),
        ("opo", {}, {"group_size": 1}, "group_size 1"),
        ("grpo", {}, {"critic": True}, "trainer.critic with advantage group_norm"),
        ("grpo", {"advantage": {"kind": "zero"}}, {}, "advantage zero without teacher_coef"),
        ("raft", {"dynamic_sampling": True}, {}, "dynamic_sampling with advantage positives"),
        ("gdpo", {"dynamic_sampling": True}, {}, "dynamic_sampling with advantage per_part"),
        ("grpo", {"advantage": {"kind": "turn_norm"}}, {"group_size": 1}, "group_size 1"),
        ("dapo", {"advantage": {"kind": "turn_norm"}}, {}, "dynamic_sampling with advantage turn_norm"),
        ("gspo", {"advantage": {"kind": "turn_norm"}}, {}, "advantage turn_norm"),
        ("dapo", {"teacher_coef": 1.0}, {}, "dynamic_sampling"),
        ("reinforce_pp", {**SEQUENCE, "kl": None}, {}, "advantage returns"),
        ("gspo", {"teacher_coef": 1.0}, {}, "distillation"),
        ("gspo", {"aggregation": "token-mean"}, {}, "token-mean"),
        ("dapo", {"loss": {"kind": "geometric_mean"}}, {}, "token-mean"),
        ("dapo", {"loss": {"dual": 1.1}}, {}, "dual 1.1"),
        ("dppo_tv", {"anchor": "old"}, {}, "old"),
        ("opo", {"anchor": "behaviour"}, {}, "anchor: behaviour"),
        ("opo", {}, {"steps": 2}, "2 steps"),
        ("grpo", {"correction": [TIS, ICEPOP]}, {}, "token_tis and icepop"),
        ("grpo", {"correction": [TIS, {"kind": "sequence_tis"}]}, {}, "token_tis and sequence_tis"),
        ("grpo", {"correction": [VETO, VETO]}, {}, "veto and veto"),
        ("grpo", {"correction": [TIS], "anchor": "behaviour"}, {}, "token_tis"),
        ("dppo_tv", {"correction": [TIS]}, {}, "token_tis"),
        ("reinforce_pp", {"kl": {"estimator": "k3+"}}, {}, "k3+"),
        ("grpo", {"kl": {"adaptive": {}}}, {}, "adaptive"),
        ("grpo", {"kl": {"estimator": "k1"}}, {}, "k1 in the loss"),
        ("gdpo", {"kl": REWARD_KL}, {}, "kl.place: reward"),
        ("gdpo", {"shaping": {"overlong": {}}}, {}, "shaping"),
        ("grpo", {"shaping": {"clip": [1, -1]}}, {}, "shaping.clip [1.0, -1.0]"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(
    preset: str, overrides: dict[str, Any], arguments: dict[str, Any], found: str
) -> None:
    recipe = resolve(preset, overrides)
    sound = {"group_size": 4, "steps": 1, "critic": False}
    with pytest.raises(ConfigError) as error:
        check(recipe, **{**sound, **arguments})
    assert error.value.found.startswith(found)


def test_valid_combinations_are_accepted() -> None:
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
