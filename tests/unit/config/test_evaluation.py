"""Sets of held-out prompts in a configuration, and the result that decides about the best version."""

import json
from pathlib import Path
from typing import Any

import pytest
from metric_rows import SECTIONS

from polyreme.config.evaluation import RESERVED, EvaluationSet, best_metric, pass_sizes
from polyreme.config.load import load_config
from polyreme.errors import ConfigError
from support.configs import run_config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(run_config(tmp_path).to_yaml())
    return path


SETS = "eval_sets=[{name: easy, data: easy.jsonl}, {name: hard, data: [{path: hard.jsonl, split: [0, 0.5]}], answers: 6, samples: 20}]"


def test_a_run_without_sets_evaluates_the_data_as_before(file: Path) -> None:
    config = load_config(file, ["data.eval=held_out.jsonl", "eval_answers=4", "eval_samples=7", "eval_temperature=0.5"])
    [first] = config.evaluation_sets
    assert (first.name, first.data, first.samples, first.answers, first.temperature) == ("", config.data.eval, 7, 4, 0.5)
    assert first.metric("accuracy") == "accuracy"
    assert config.evaluates(0) is False and config.evaluates(config.iterations)


def test_named_sets_come_after_the_data(file: Path) -> None:
    config = load_config(file, ["data.eval=held_out.jsonl", SETS])
    assert [each.name for each in config.evaluation_sets] == ["", "easy", "hard"]
    easy, hard = config.eval_sets
    assert easy.data == Path.cwd() / "easy.jsonl"  # of an override
    assert (easy.samples, easy.answers, hard.samples, hard.answers) == (500, 1, 20, 6)
    assert hard.metric("pass@2") == "hard/pass@2"
    assert config.fingerprint() == load_config(file).fingerprint()  # operational
    only = load_config(file, [SETS, "iterations=0", "max_staleness=1"])
    assert [each.name for each in only.evaluation_sets] == ["easy", "hard"] and only.holds(0)


@pytest.mark.parametrize(
    ("best", "found"),
    [
        (None, ("", "mean")),
        ("mean", ("", "mean")),
        ("easy/mean", ("easy", "mean")),
        ("hard/pass@4", ("hard", "pass@4")),
        ("hard/pass@6", ("hard", "pass@6")),
        ("hard/majority@6", ("hard", "majority@6")),
        ("hard/reward/exact", ("hard", "reward/exact")),
        ("reward/exact", ("", "reward/exact")),
        ("hard/reward/exact/part", ("hard", "reward/exact/part")),
    ],
)
def test_the_metric_that_decides(file: Path, best: str | None, found: tuple[str, str]) -> None:
    config = load_config(file, ["data.eval=held_out.jsonl", SETS, *([f"eval_best={best}"] if best else [])])
    settings, metric = best_metric(config.evaluation_sets, config.eval_best, config.reward_names)
    assert (settings.name, metric) == found


@pytest.mark.parametrize(
    "overrides",
    [
        ["eval_best=mean"],  # no set
        [SETS, "eval_best=mean"],  # no data.eval
        [SETS, "eval_best=other/mean"],
        [SETS, "eval_best=easy/pass@1"],  # one answer
        [SETS, "eval_best=hard/pass@3"],
        [SETS, "eval_best=hard/mean@5"],
        [SETS, "eval_best=hard/accuracy"],
        [SETS, "eval_best=hard/reward/other"],
        [SETS, "eval_best=hard/pass@"],
        [SETS, "eval_best=hard/pass@x"],
        [SETS, "eval_best=hard/other@6"],
        ["eval_sets=[{name: a, data: x}, {name: a, data: y}]"],
        ["eval_sets=[{name: reward, data: x}]"],
        ["eval_sets=[{name: a/b, data: x}]"],
        ["eval_sets=[{name: a, data: x, pattern: '('}]"],
        ["eval_sets=[{name: a}]"],
        ["iterations=0"],
    ],
)
def test_what_cannot_be_evaluated_is_refused(file: Path, overrides: list[Any]) -> None:
    with pytest.raises(ConfigError):
        load_config(file, overrides)


def own(**keys: Any) -> str:
    return "eval_sets=" + json.dumps([{"name": "own", "data": "x.jsonl", "answers": 2, **keys}])


FILE = {"file": "x.py"}
JUDGED = own(environment=FILE, scored_by="reward")
PRODUCT = ["reward=null", "environment.online={}"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([own(scored_by="reward")], "belongs to a set with an `environment`"),
        ([own(environment={"online": {}})], "cannot play held-out tasks"),
        ([own(environment={"tools": ["calculator"]}, scored_by="environment")], "give no rewards"),
        ([own(environment=FILE), "data.template=none"], "needs data.template: chat"),
        ([own(environment=FILE), "eval_best=own/pass@2"], "needs environment.correctness"),
        ([own(environment=FILE), "eval_best=own/reward/exact"], "own/reward/environment"),
        ([own(environment=FILE), *PRODUCT, "data.eval=y"], "only the product can play"),
        ([own(), *PRODUCT], "only the product can play"),
        ([own(environment=FILE, data=[{"path": "x", "tools": ["calculator"]}])], "environment.tools lists none"),
        ([JUDGED, "reward=null", "environment.file=y.py"], "own needs the section `reward`"),
        ([own(environment=FILE), "reward=null", "environment.file=y.py", "data.eval=y", "eval_best=pass@1"], "eval_best"),
    ],
)
def test_what_an_environment_of_a_set_cannot_have(file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(file, overrides)


def test_a_set_has_an_environment_of_its_own(file: Path) -> None:
    config = load_config(file, ["data.eval=held_out.jsonl", own(environment=FILE), "eval_best=own/reward/environment"])
    first, played = config.evaluation_sets
    assert [*config.environments] == ["own"] and config.environments["own"].file == Path.cwd() / "x.py"
    assert config.is_rewarded(first) and not config.is_rewarded(played)
    assert config.part_names == ("exact",) and played.metrics(config.part_names)[-1:] == ["reward/environment"]
    assert config.played_data("own") == (played.data,) and config.played_data("") == (config.data.train, first.data)
    assert config.fingerprint() == load_config(file).fingerprint()
    judged = load_config(file, [JUDGED, "eval_best=own/pass@2"])  # the reward is 1 or 0
    assert judged.eval_sets[0].metrics(judged.part_names)[-2:] == ["reward/exact", "reward/environment"]
    tools = load_config(file, [own(environment={"tools": ["calculator"]})])
    assert tools.is_rewarded(tools.eval_sets[0])
    product = load_config(file, [own(environment=FILE), *PRODUCT])
    assert [*product.environments] == ["", "own"] and product.played_data("own") == (product.eval_sets[0].data,)


def test_no_set_has_the_name_of_a_group_of_metrics() -> None:
    groups = {each.name.partition("/")[0] for metrics in SECTIONS.values() for each in metrics if "/" in each.name}
    assert {group for group in groups if group.islower()} <= RESERVED


def test_pass_at_k_is_there_for_powers_of_two_and_all_answers() -> None:
    assert [pass_sizes(count) for count in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_metrics_of_a_set() -> None:
    several = EvaluationSet(name="a", data=Path("x"), answers=6)
    assert several.metrics(["exact"]) == [
        *("mean", "mean@6", "best@6", "majority@6", "pass@1", "pass@2", "pass@4", "pass@6", "reward/exact")
    ]
    assert EvaluationSet(name="a", data=Path("x")).metrics([]) == ["mean"]


def test_an_unknown_metric_is_refused_with_those_of_each_set(file: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(file, ["data.eval=held_out.jsonl", SETS, "eval_best=hard/pass@3"])
    for name in ("mean", "easy/mean", "easy/reward/exact", "hard/best@6", "hard/pass@6"):
        assert name in error.value.found
