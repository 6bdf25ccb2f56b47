"""The section `data` with several sources, read from and written to a file."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.config.data import DataConfig, DataSource, TaskSource, WeightedSource
from polyreme.config.describe import annotated_yaml
from polyreme.config.load import load_config, parse_config
from polyreme.config.reward import RewardConfig
from polyreme.config.run import RunConfig

RUN = """
iterations: 1
groups_per_iteration: 1
group_size: 2
model: {path: model}
data:
  train: %s
  eval: [held_out.csv, {path: b.parquet, split: [0.9, 1]}]
rollout: {max_new_tokens: 32, max_model_len: 2048}
reward: {rewards: [{name: exact}]}
trainer: {optimizer: {lr: 1.0e-3}}
"""


def load(folder: Path, train: str) -> RunConfig:
    (folder / "run.yaml").write_text(RUN % train)
    return load_config(folder / "run.yaml")


def test_paths_of_sources_are_relative_to_the_file(tmp_path: Path) -> None:
    config = load(tmp_path, "[a.jsonl, {path: sub/b.parquet, rename: {answer: x.y}, add: {kind: sums}}]")
    added = WeightedSource(path=tmp_path / "sub" / "b.parquet", rename={"answer": "x.y"}, add={"kind": "sums"})
    assert config.data.train == (tmp_path / "a.jsonl", added)
    assert config.data.eval == (tmp_path / "held_out.csv", TaskSource(path=tmp_path / "b.parquet", split=(0.9, 1)))
    assert config.data.weights == (None, None)
    assert load_config(tmp_path / "run.yaml", ["data.train=[c.jsonl]"]).data.train == (Path.cwd() / "c.jsonl",)


@pytest.mark.parametrize(
    "train", ["[a.jsonl, {path: b.parquet}]", "[{path: a.jsonl, weight: 2}, {path: b.jsonl, weight: 1}]", "a.jsonl"]
)
def test_the_resolved_configuration_reads_back(tmp_path: Path, train: str) -> None:
    config = load(tmp_path, train)
    for text in (annotated_yaml(config), config.to_yaml()):
        assert parse_config(yaml.safe_load(text), "the text") == config


def test_the_fingerprint_depends_on_training_sources_and_their_order_of_prompts_alone(tmp_path: Path) -> None:
    one = load(tmp_path, "[a.jsonl, {path: b.parquet}]")
    data = one.data
    assert one.fingerprint() == one.model_copy(update={"data": data.model_copy(update={"eval": None})}).fingerprint()
    changes = ({"train": (tmp_path / "a.jsonl",)}, {"shuffle": False}, {"shuffle_seed": 1}, {"deduplicate": True})
    changed = {one.model_copy(update={"data": data.model_copy(update=change)}).fingerprint() for change in changes}
    assert len(changed | {one.fingerprint()}) == len(changes) + 1


def test_choices_name_rewards_by_a_column() -> None:
    rewards = {"rewards": [{"name": "exact"}]}
    RewardConfig.model_validate({**rewards, "choose_by": "data_source", "choices": {"gsm8k": "exact"}})
    with pytest.raises(ValueError, match="none of the rewards"):
        RewardConfig.model_validate({**rewards, "choose_by": "data_source", "choices": {"gsm8k": "exat"}})
    with pytest.raises(ValueError, match="choose_by"):
        RewardConfig.model_validate({**rewards, "choices": {"gsm8k": "exact"}})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), datetime.date(2026, 1, 1), {1, 2}])
def test_an_added_column_has_what_json_has(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="as JSON has them"):
        DataSource(path=tmp_path, add={"a": [value]})


NAMED = """
train: openai/gsm8k
config: main
split: dev
eval: openai/gsm8k@v2
"""


def test_a_text_that_no_file_has_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    config = load(tmp_path, "[openai/gsm8k, other/set@v1.0, sub/none, rows/a.jsonl, a/b/c, ./x/y]")
    local = [tmp_path / path for path in ("sub/none", "rows/a.jsonl", "a/b/c", "x/y")]
    assert config.data.train == (Path("openai/gsm8k"), Path("other/set@v1.0"), *local)
    (tmp_path / "openai" / "gsm8k").mkdir(parents=True)
    assert load(tmp_path, "openai/gsm8k").data.train == tmp_path / "openai" / "gsm8k"


def test_keys_beside_a_name_go_to_its_source() -> None:
    found = DataConfig.model_validate(yaml.safe_load(NAMED))
    assert found.train == (WeightedSource(path=Path("openai/gsm8k"), config="main", split="dev"),)
    assert found.eval == (TaskSource(path=Path("openai/gsm8k@v2"), config="main"),)
    assert (found.config, found.split) == (None, None)


@pytest.mark.parametrize(
    "text", ["{train: /rows.jsonl, split: dev}", "{train: [a/b], config: main}", "{train: [{path: /x, split: dev}]}"]
)
def test_a_configuration_or_split_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="belong to a name like owner/name"):
        DataConfig.model_validate(yaml.safe_load(text))
