"""The overrides of `polyreme eval`, and its results from a record."""

from pathlib import Path
from typing import Any

import pytest

from polyreme.cli.commands.evaluate import evaluation_overrides, results
from polyreme.config.load import load_config
from polyreme.display.report import report
from polyreme.display.summary import summary_lines
from polyreme.errors import ConfigError
from polyreme.rundir.progress import Progress
from polyreme.rundir.reader.scalars import scalars
from support.configs import run_config
from support.record_lines import read_evaluation


@pytest.fixture
def file(tmp_path: Path) -> Path:
    config = run_config(tmp_path, name="letters")
    tree = config.model_copy(update={"data": config.data.model_copy(update={"eval": tmp_path / "eval.jsonl"})})
    (tmp_path / "run.yaml").write_text(tree.to_yaml())
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["algorithm={preset: ppo}", "trainer.critic.warmup_iterations=3"],
        ["algorithm={preset: distillation}", "teacher={url: 'http://127.0.0.1:1/v1', model: t}", "group_size=1"],
        ["max_staleness=2", "trainer.save_interval=50", "trainer.optimizer.warmup=5"],
        ["max_staleness=1", "rollout.max_new_tokens=32", "rollout.tokens_per_iteration=16"],
    ],
)
def test_it_trains_nothing_and_needs_no_other_model(file: Path, tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(file, evaluation_overrides(file, overrides, tmp_path / "other"))
    assert (config.iterations, config.max_staleness, config.teacher) == (0, 0, None)
    assert config.model.path == (tmp_path / "other").resolve()
    assert config.recipe.kl is None and not config.algorithm.has_critic
    assert not any(line.startswith("warning") for line in summary_lines(config))
    assert any("trains nothing" in line for line in summary_lines(config))


def test_each_evaluation_has_a_directory_of_its_own(file: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "letters-eval-1").mkdir(parents=True)
    config = load_config(file, evaluation_overrides(file, ["eval_answers=4"], None))
    assert (config.name, config.eval_answers) == ("letters-eval-2", 4)
    assert config.model.path == tmp_path / "model"


@pytest.mark.parametrize("overrides", [["data.eval=null"], ["data.eval=null", "eval_stop_after=2"], ["eval_pattern='('"]])
def test_a_configuration_that_cannot_be_evaluated_is_an_error(file: Path, overrides: list[str]) -> None:
    with pytest.raises(ConfigError):
        evaluation_overrides(file, overrides, None)


def test_the_results_of_a_record() -> None:
    record: dict[str, Any] = {"kind": "eval", "version": 0, "score": 0.5, "pass@2": 0.7, "samples": 4, "seconds": 1.0}
    assert results(read_evaluation({**record, "parts": {"exact": 0.4}})) == {
        "score": 0.5,
        "pass@2": 0.7,
        "samples": 4,
        "reward/exact": 0.4,
    }


def test_the_results_of_several_sets() -> None:
    record: dict[str, Any] = {"kind": "eval", "version": 0, "easy/accuracy": 0.5, "hard/pass@2": 0.7, "hard/reward/exact": 0.4}
    record |= {"samples": 4, "seconds": 1.0, "parts": {}, "result": {"metric": "hard/pass@2", "value": 0.7}, "time": 0.0}
    assert results(read_evaluation(record)) == {"easy/accuracy": 0.5, "hard/pass@2": 0.7, "hard/reward/exact": 0.4, "samples": 4}
    assert list(scalars(record)) == [("easy/accuracy", 0.5, 0), ("hard/pass@2", 0.7, 0), ("hard/reward/exact", 0.4, 0)]
    progress = Progress(8)
    progress.add(record)
    assert (progress.metric, progress.score()) == ("hard/pass@2", 0.7)


def test_the_report_of_an_evaluation_promises_no_model(tmp_path: Path) -> None:
    config = run_config(tmp_path, iterations=0)
    assert report(config, Progress(8), tmp_path) == [f"run      {tmp_path}"]
