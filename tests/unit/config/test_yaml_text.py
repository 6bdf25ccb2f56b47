"""A key that stands twice is an error in every YAML text that is read."""

from pathlib import Path

import pytest
import yaml

from polyreme.config.load import load_config, load_reward_config
from polyreme.config.yaml_text import RepeatedKeyError, load_yaml
from polyreme.errors import ConfigError
from polyreme.import_config.reading.read import read_file
from support.configs import run_config


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: 1\nb: 2\na: 3\n", "a in line 1 and again in line 3"),
        ("a:\n  b: {c: 1, d: 2,\n    c: 3}\n", "c in line 2 and again in line 3"),
        ("a:\n- b: 1\n- {b: 1, 'b': 2}\n", "b in line 3 and again in line 3"),
        ("yes: 1\ntrue: 2\n", "true in line 1 and again in line 2"),
        ("1: 1\n0x1: 2\n", "0x1 in line 1 and again in line 2"),
        ("a: &x {b: 1}\nc: {<<: *x, d: 1, d: 2}\n", "d in line 2 and again in line 2"),
    ],
)
def test_a_repeated_key_is_named_with_both_lines(text: str, found: str) -> None:
    with pytest.raises(RepeatedKeyError) as caught:
        load_yaml(text, "the text")
    assert caught.value.found == found and "the text" in caught.value.expected


@pytest.mark.parametrize(
    "text",
    [
        "a: &x {b: 1, c: 2}\nd: {<<: *x, b: 3}\ne: {<<: *x}\n",
        "a: &x {b: 1}\nd: &y {<<: *x, b: 2}\ne: {<<: [*x, *y], b: 4}\n",
        "d: &y {<<: &x {b: 1}, b: 2}\ne:\n  <<: *x\n  <<: *y\n",
        "a: [1, 1]\nb: {a: 1}\n",
        "a: &x [1]\nb: *x\nc: *x\n",
        "",
    ],
)
def test_merges_and_aliases_are_no_repetitions(text: str) -> None:
    assert load_yaml(text, "the text") == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["a: 2026-13-45", "a: " + "9" * 5000, "a: " + "[" * 5000, "a: {", "a: !x 1", "- a\n---\n- b"])
def test_text_that_is_no_yaml_of_plain_values_has_one_kind_of_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml(text, "the text")


def test_every_reader_of_yaml_refuses_a_repeated_key(tmp_path: Path) -> None:
    run = run_config(tmp_path).to_yaml()
    file = tmp_path / "run.yaml"
    file.write_text(run + "trainer: {optimizer: {lr: 1.0e-6}}\n")
    with pytest.raises(RepeatedKeyError, match="trainer in line"):
        load_config(file)
    file.write_text(run)
    with pytest.raises(RepeatedKeyError, match="lr in line 1"):
        load_config(file, ["trainer.optimizer={lr: 1, lr: 2}"])
    file.write_text("reward: {rewards: [{name: exact, name: length}]}\n")
    with pytest.raises(RepeatedKeyError):
        load_reward_config(file)
    with pytest.raises(RepeatedKeyError):
        read_file(file)
    (tmp_path / "ds.json").write_text('{"train_batch_size": 1,\n"train_batch_size": 2}')
    with pytest.raises(RepeatedKeyError, match="line 1 and again in line 2"):
        read_file(tmp_path / "ds.json")


@pytest.mark.parametrize("text", ["a: 2026-13-45", "a: " + "[" * 5000, "\ufeffname: x\nname: y"])
def test_a_configuration_never_ends_in_a_traceback(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_config(tmp_path / "run.yaml")


TENFOLD = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9))
MERGED = "\n".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 9))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"a0: &a0 [x]\n{TENFOLD}", "stand for more than"),
        (f"a0: &a0 {{x: 1}}\n{MERGED}", "stand for more than"),
        ("a: &a [*a]", "alias of what it is part of"),
        ("a: &a {b: {c: *a}}", "alias of what it is part of"),
    ],
    ids=["sequences", "merges", "list", "mapping"],
)
def test_aliases_do_not_fill_the_memory(text: str, found: str) -> None:
    with pytest.raises(yaml.YAMLError, match=found):
        load_yaml(text, "the text")


def test_aliases_of_some_values_are_read() -> None:
    assert load_yaml("a: &a {x: 1}\nb: {<<: *a, y: [*a, *a]}", "the text")["b"] == {"x": 1, "y": [{"x": 1}, {"x": 1}]}
