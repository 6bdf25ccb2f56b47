"""What becomes of a key: losses come first, in the text and on the terminal, and nothing is silent."""

import pytest
import yaml

from polyreme.config.load import parse_config
from polyreme.errors import ConfigError
from polyreme.import_config.application import apply
from polyreme.import_config.convert import choice, lookup
from polyreme.import_config.render import report, text_of
from polyreme.import_config.rules import Fate, Lost, Noted, Rule, System, Unresolved, flatten, idle, lost, part_of
from polyreme.import_config.systems import SYSTEMS

TABLE = System(
    "other",
    "Other",
    (
        Rule("steps", "iterations"),
        Rule("rate", "trainer.optimizer.lr", "", lambda value, _: Lost("negative") if value < 0 else value),
        Rule("file", "model.path", "", lambda value, _: Noted(value, "CHECK: is it here?")),
        Rule("style", "trainer.optimizer.schedule", "", lookup({"flat": "constant"}, "none")),
        Rule("kind", "algorithm.preset", "", choice("kind of an algorithm", {"group": "grpo"})),
        *part_of("iterations", "epochs"),
        *idle("speed", "speed.*"),
        *lost("no such sampling", "top_p", unless=(None, 1)),
        *lost("only for others", "mode.b", off=lambda values: "" if values.get("mode.a") else "mode.a is off"),
        *lost("another world", "world", unless=(None, False), another_run=True),
        Rule("speed.limit", "rollout.max_num_seqs"),
    ),
    {"rate": 0.5},
)


def test_losses_are_ordered_by_gravity_and_say_why() -> None:
    found = apply(TABLE, {"top_p": 0.9, "unheard": 1, "world": True, "rate": -1, "style": "wavy"})
    assert [(entry.key, entry.fate) for entry in found.lost] == [
        ("world", Fate.ANOTHER_RUN),
        ("unheard", Fate.UNKNOWN),
        ("rate", Fate.LOST),
        ("top_p", Fate.LOST),
        ("style", Fate.LOST),
    ]
    lines = report(found, "Other")
    assert lines[0].startswith("NOT CARRIED OVER (5)") and "ANOTHER KIND OF RUN: another world" in lines[1]
    assert text_of(found, "Other", "f").splitlines()[1 : 1 + len(lines)] == [f"# {line}" for line in lines]


def test_a_value_that_changes_nothing_is_no_loss() -> None:
    found = apply(TABLE, {"top_p": 1.0, "world": False, "style": "none", "mode.b": 3, "speed.any": 1, "epochs": 2})
    assert found.lost == [] and [entry.key for entry in found.parts] == ["epochs"]
    assert {entry.key: entry.note for entry in found.idle}["mode.b"] == "mode.a is off"
    assert report(found, "Other") == ["Everything that changes training was carried over from Other."]


def test_the_longest_pattern_and_the_exact_key_win() -> None:
    assert apply(TABLE, {"speed.limit": 7}).values["rollout.max_num_seqs"] == 7


def test_a_choice_without_counterpart_is_refused() -> None:
    assert apply(TABLE, {"kind": "group"}).values["algorithm.preset"] == "grpo"
    with pytest.raises(ConfigError, match="wild"):
        apply(TABLE, {"kind": "wild"})


def test_a_value_that_is_no_number_is_an_error_with_its_key() -> None:
    with pytest.raises(ConfigError, match="rate"):
        apply(TABLE, {"rate": "fast"})


def test_checks_are_listed_after_the_losses() -> None:
    found = apply(TABLE, {"file": "x", "top_p": 0.5})
    lines = report(found, "Other")
    assert lines[2] == "CHECK (1): decide on these keys before a run:" and "model.path: x" in lines[3]


def test_unresolved_texts_stay_where_a_text_is_wanted_and_are_lost_elsewhere() -> None:
    found = apply(TABLE, {"file": Unresolved("$DIR/m"), "rate": Unresolved("$RATE"), "speed.any": Unresolved("$X")})
    assert found.values["model.path"] == "$DIR/m" and "CHECK" in found.comments["model.path"]
    assert found.values["trainer.optimizer.lr"] == 0.5  # the system's default, which the list says
    assert [entry.key for entry in found.lost] == ["rate"] and "0.5" in found.lost[0].note
    assert apply(TABLE, {"world": Unresolved("$WORLD")}).lost[0].fate is Fate.ANOTHER_RUN


def test_a_rule_without_a_counterpart_declares_its_fate() -> None:
    with pytest.raises(ValueError, match="fate"):
        Rule("key", "", "an option of something")


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_no_pattern_says_no_effect_about_a_whole_section(system: System) -> None:
    """Sections in which keys change training; below them, each key or a narrow pattern has its own fate."""
    patterns = [rule.key for rule in system.rules if rule.fate is Fate.IDLE and "*" in rule.key]
    sections = ("algorithm", "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model", "critic", "data")
    others = (
        "megatron_training",
        "actor_config",
        "critic_config",
        "rl_config",
        "generate_config",
        "algo",
        "actor",
        "reward",
        "rollout",
    )
    wide = {f"{section}.*" for section in (*sections, *others)} | {"*", "actor_rollout_ref.*", "trainer.*", "reward_model.*"}
    wide |= {f"{section}.optim.*" for section in sections} | {"critic_*", "actor_*"}
    assert not wide & set(patterns)


def test_the_output_is_read_again_as_it_is() -> None:
    """Comments with quotes, colons and line ends do not break the file."""
    text = 'algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 4, top_p: 0.5}}\nodd: {\'key: "x"\': "a: b # c\\nd"}\n'
    found = apply(SYSTEMS["verl"], dict(flatten(yaml.safe_load(text))))
    found.values["iterations"], found.comments["iterations"] = 1, "one"
    run = parse_config(yaml.safe_load(text_of(found, "verl", "odd")), "odd")
    assert run.group_size == 4 and [entry.key for entry in found.lost] == ['odd.key: "x"', "actor_rollout_ref.rollout.top_p"]


def test_two_keys_of_a_file_for_one_of_ours_are_to_be_decided() -> None:
    system = System("other", "Other", (Rule("new", "group_size"), Rule("old", "group_size"), Rule("steps", "iterations")))
    assert "CHECK: old is in the file, too" in apply(system, {"old": 4, "new": 8}).comments["group_size"]
    assert "CHECK" not in apply(system, {"new": 8, "steps": 3}).comments["group_size"]
