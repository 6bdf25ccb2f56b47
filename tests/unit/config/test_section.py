"""A field's type decides how it is read, and its mark whether it is part of the fingerprint."""

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from polyreme.config.load import load_config, parse
from polyreme.config.run import RunConfig
from polyreme.config.section import Operational, Section, holds_path, is_operational, known_keys, subsections, without_operational
from polyreme.errors import ConfigError


class Leaf(Section):
    file: Path | None = None
    speed: Operational[int | None] = None
    size: int = 1


class Whole(Section):
    one: Leaf = Leaf()
    several: list[Leaf] = Field([])
    perhaps: Leaf | None = None
    hidden: Operational[Leaf | None] = None


def test_a_fields_type_decides_its_sections() -> None:
    fields = Whole.model_fields
    assert [subsections(fields[name]) for name in ("one", "several", "perhaps", "hidden")] == [[Leaf]] * 4
    assert holds_path(Leaf.model_fields["file"]) and not holds_path(Leaf.model_fields["size"])
    assert subsections(Leaf.model_fields["file"]) == []
    assert list(known_keys(Whole))[:5] == ["one", "one.file", "one.speed", "one.size", "several"]


def test_operational_fields_are_left_out_at_every_depth() -> None:
    assert is_operational(Leaf.model_fields["speed"]) and not is_operational(Leaf.model_fields["size"])
    leaf = Leaf(speed=3, size=2)
    assert without_operational(Whole(one=leaf, several=[leaf, Leaf()], hidden=leaf)) == {
        "one": {"file": None, "size": 2},
        "several": [{"file": None, "size": 2}, {"file": None, "size": 1}],
        "perhaps": None,
    }


def test_every_path_of_the_schema_is_resolved_wherever_it_stands(tmp_path: Path) -> None:
    tls = {"certificate": "c.pem", "key": "k.pem", "ca": "ca.pem"}
    tree = {
        "iterations": 1,
        "groups_per_iteration": 1,
        "group_size": 2,
        "model": {"path": "model"},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_prompt_tokens": 8},
        "rollout": {"max_new_tokens": 8, "max_model_len": 16},
        "reward": {
            "rewards": [{"file": "reward.py"}, {"model": "judge"}, {"url": "https://h/", "protocol": "native", "security": tls}],
            "security": tls,
        },
        "trainer": {"optimizer": {"lr": 1e-3}, "sft": [{"data": "sft.jsonl", "steps": 1, "batch_size": 1, "lr": 1e-3}]},
        "security": tls,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    config = load_config(tmp_path / "run.yaml")
    found = {*paths(config)}
    assert all(path.is_absolute() and path.is_relative_to(tmp_path) for path in found)
    assert {path.name for path in found} == {
        *("runs", "model", "train.jsonl", "eval.jsonl", "reward.py", "judge", "sft.jsonl"),
        *("c.pem", "k.pem", "ca.pem"),
    }


def paths(section: Section) -> list[Path]:
    found = []
    for name in type(section).model_fields:
        value = getattr(section, name)
        for each in value if isinstance(value, list) else [value]:
            found += paths(each) if isinstance(each, Section) else [each] if isinstance(each, Path) else []
    return found


def test_all_keys_outside_subsections_are_described() -> None:
    def check(section: type[Section], prefix: str) -> list[str]:
        bare = []
        for name, field in section.model_fields.items():
            inner = subsections(field)
            bare += [key for each in inner for key in check(each, f"{prefix}{name}.")]
            bare += [] if inner or field.description else [prefix + name]
        return bare

    assert check(RunConfig, "") == []


class Typed(Section):
    size: int = 1
    rate: float | None = None
    pair: tuple[float, float] | None = None
    sizes: list[int] = Field([])
    day: date | None = None
    flag: bool = False


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"size": True}, ["size: Input should be a valid integer, found true"]),
        ({"size": False, "rate": True}, ["size: Input should be a valid integer, found false", "rate: ", "found true"]),
        ({"pair": [0.5, True]}, ["pair.1: Input should be a valid number, found true"]),
        ({"sizes": [1, False]}, ["sizes.1: Input should be a valid integer, found false"]),
        ({"day": 20260101}, ["day: Input should be a valid date", "found 20260101"]),
        ({"day": "2026"}, ["day: Input should be a valid date", "found 2026"]),
    ],
)
def test_a_value_of_another_type_is_named_never_converted(given: dict[str, Any], found: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(given, "run.yaml", Typed)
    for part in found:
        assert part in str(raised.value)


def test_values_of_their_type_are_taken() -> None:
    given = {"size": "3", "rate": 1, "pair": [0, 1.5], "sizes": [2.0], "day": "2026-01-02", "flag": True}
    taken = Typed.model_validate(given)
    assert (taken.size, taken.rate, taken.pair, taken.sizes, taken.flag) == (3, 1.0, (0.0, 1.5), [2], True)
    assert taken.day == date(2026, 1, 2)
    assert Typed(day=date(2026, 1, 2)).day == date(2026, 1, 2)
