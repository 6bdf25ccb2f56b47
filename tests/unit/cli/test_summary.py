"""The summary that is printed before a run starts."""

from pathlib import Path

import pytest

from polyreme.cli.summary import summary_lines
from polyreme.config.load import parse_config
from support.configs import run_config


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, []),
        ({"save_interval": 1000}, []),
        ({"save_interval": 1001}, ["trainer.save_interval"]),
        ({"eval": "eval.jsonl", "eval_interval": 1001}, ["eval_interval"]),
        ({"eval_interval": 1001}, []),  # without held-out prompts nothing is evaluated anyway
    ],
)
def test_an_interval_beyond_the_run_is_a_warning(tmp_path: Path, changes: dict[str, int], warned: list[str]) -> None:
    tree = run_config(tmp_path).model_dump(mode="json")
    tree["trainer"]["save_interval"] = changes.get("save_interval", 0)
    tree["data"]["eval"] = changes.get("eval")
    tree["eval_interval"] = changes.get("eval_interval", 0)
    warnings = [line for line in summary_lines(parse_config(tree, "the test")) if line.startswith("warning")]
    assert [line.split()[1] for line in warnings] == warned


def test_saves_and_evaluations_beyond_the_run_happen_at_its_end(tmp_path: Path) -> None:
    tree = run_config(tmp_path).model_dump(mode="json")
    tree["trainer"]["save_interval"] = 5000
    [saves] = [line for line in summary_lines(parse_config(tree, "the test")) if line.startswith("saves")]
    assert "after iteration 1000," in saves
