"""Every key that published configurations have has a fate, and the systems' own defaults lose nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.errors import ConfigError
from polyreme.import_config.application import apply
from polyreme.import_config.openrlhf_names import RENAMED
from polyreme.import_config.rules import ITERATIONS, Fate, Unresolved, flatten
from polyreme.import_config.systems import SYSTEMS, prepared, translate

TABLES = sorted((Path(__file__).parent / "published").glob("*.yaml"))
BASE: dict[str, dict[str, Any]] = {"verl": {"algorithm.adv_estimator": "grpo"}, "openrlhf": {"pretrain": "model"}}
"""Values beside the one that is tested."""


def published(path: Path) -> Iterator[tuple[str, list[Any]]]:
    """The keys of a table with their values."""
    for section in yaml.safe_load(path.read_text()).values():
        yield from flatten(section)


def name_of(system: str, key: str, given: Any) -> str:
    """The key of the rules."""
    return RENAMED.get(key, key) if system == "openrlhf" else list(given)[-1]


def test_every_system_has_a_table() -> None:
    assert {path.stem for path in TABLES} == set(SYSTEMS)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_value_is_carried_over_lost_or_without_effect(path: Path) -> None:
    """None is silent, and none is unknown. A value may be refused with an error that shows it."""
    system = SYSTEMS[path.stem]
    for key, values in published(path):
        for value in values:
            given = prepared(system, {**BASE.get(path.stem, {}), key: value})
            try:
                found = apply(system, {**given, ITERATIONS: 100})
            except ConfigError as error:
                assert str(value) in str(error), (key, value)
                continue
            assert not [entry for entry in found.lost if entry.fate is Fate.UNKNOWN], (key, value)
            ours = name_of(path.stem, key, given)
            listed = {entry.key for entry in (*found.lost, *found.parts, *found.idle)}
            assert ours in listed or any(comment.startswith(ours) for comment in found.comments.values()), (key, value)


def test_verls_own_defaults_lose_nothing() -> None:
    """The whole file of defaults, as verl prints it."""
    tables = yaml.safe_load((Path(__file__).parent / "published" / "verl.yaml").read_text())
    given = {key: values[0] for key, values in flatten(tables["defaults"])}
    found = apply(SYSTEMS["verl"], {**prepared(SYSTEMS["verl"], given), ITERATIONS: 100})
    assert found.lost == []


def test_the_first_values_of_mindspeed_rl_and_paddlenlp_lose_nothing() -> None:
    for path in TABLES:
        if path.stem in ("mindspeed", "paddlenlp"):
            given = {key: values[0] for key, values in published(path)}
            found = apply(SYSTEMS[path.stem], {**prepared(SYSTEMS[path.stem], given), ITERATIONS: 100})
            assert [entry.key for entry in found.lost] == []


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_key_without_effect_never_sets_one_of_ours(path: Path) -> None:
    """A rule that says so must be true of every value that was published."""
    system = SYSTEMS[path.stem]
    base = BASE.get(path.stem, {})
    plain = apply(system, {**prepared(system, base), ITERATIONS: 100}).values
    for key, values in published(path):
        for value in values:
            given = prepared(system, {**base, key: value})
            if all(rule.fate is Fate.IDLE for rule in system.rules_of(name_of(path.stem, key, given))):
                assert apply(system, {**given, ITERATIONS: 100}).values == plain, key


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_value_that_a_file_leaves_open_is_said(path: Path) -> None:
    """Such as `$EPOCHS`: in the list of losses, or among ours with CHECK, or refused; never a failure of the import."""
    system = SYSTEMS[path.stem]
    base = BASE.get(path.stem, {})
    for key, _ in published(path):
        given = prepared(system, {**base, key: Unresolved("$OPEN")})
        try:
            found = translate(system, given)
        except ConfigError as error:
            assert "$OPEN" in str(error), key
            continue
        checks = " ".join(comment for comment in found.comments.values() if "CHECK" in comment)
        said = {entry.key for entry in (*found.lost, *found.idle, *found.parts)}
        named = found.comments.get("name", "").startswith(key)  # a run's name changes nothing
        assert named or name_of(path.stem, key, given) in said or "$OPEN" in checks + str(found.values), key
