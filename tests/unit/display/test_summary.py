"""The summary that is printed before a run starts."""

import resource
from pathlib import Path
from typing import Any

import pytest

from polyreme.config.load import parse_config
from polyreme.display.summary import summary_lines
from support.configs import run_config


def lines_of(folder: Path, **changes: Any) -> list[str]:
    """The summary of a run; a dotted key names a field of a section."""
    tree = run_config(folder).model_dump(mode="json")
    for key, value in changes.items():
        *sections, name = key.split("__")
        part = tree
        for section in sections:
            part = part[section]
        part[name] = value
    return summary_lines(parse_config(tree, "the test"))


def test_it_counts_groups_samples_mini_batches_and_optimizer_steps(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, iterations=10, algorithm__minibatches=3, algorithm__epochs=2)
    assert lines[0].endswith(" 10 of 4 prompts x 2 samples = 40 groups, 80 samples")
    assert lines[1].endswith(" 3 of up to 2 groups (4 samples) x 2 epoch(s) = 6 optimizer step(s) per iteration, 60 in all")


def test_points_of_saving_and_evaluating_are_named(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, iterations=10, trainer__save_interval=4, data__eval="eval.jsonl", eval_interval=5)
    shown = {line.split()[0]: line for line in lines}
    assert "after iteration 4, 8, 10," in shown["saves"]
    assert "before iteration 1 and after iteration 5, 10" in shown["evaluates"]


def test_the_points_of_a_run_without_an_end_need_no_memory(tmp_path: Path) -> None:
    evaluated = {"data__eval": "eval.jsonl", "eval_interval": 1}
    before, pages = resource.getrlimit(resource.RLIMIT_AS), int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29), before[1]))
    try:
        for iterations, points in ((6, "1, 2, 3, 4, 5, 6"), (7, "1, 2, ... 7"), (10**18, f"1, 2, ... {10**18}")):
            lines = lines_of(tmp_path, iterations=iterations, trainer__save_interval=0, **evaluated)
            assert any(line.endswith(f"before iteration 1 and after iteration {points}") for line in lines)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_warm_up_that_the_run_never_leaves_is_a_warning(tmp_path: Path) -> None:
    critic = {"path": None, "optimizer": None, "warmup_iterations": 3}
    warned = lines_of(tmp_path, iterations=3, algorithm={"preset": "ppo"}, trainer__critic=critic)
    assert [line.split()[1] for line in warned if line.startswith("warning")] == ["trainer.critic.warmup_iterations"]
    warned = lines_of(tmp_path, iterations=3, trainer__optimizer={"lr": 1e-3, "warmup": 4})
    assert [line.split()[1] for line in warned if line.startswith("warning")] == ["trainer.optimizer.warmup"]


def test_a_reference_that_is_never_renewed_and_a_critics_long_warm_up_are_warnings(tmp_path: Path) -> None:
    def warned(renew_interval: int, warmup: int) -> list[str]:
        algorithm = {"preset": "ppo", "kl": {"renew_interval": renew_interval}}
        critic = {"optimizer": {"lr": 1e-3, "warmup": warmup}}
        lines = lines_of(tmp_path, iterations=3, algorithm=algorithm, trainer__critic=critic)
        return [line.split()[1] for line in lines if line.startswith("warning")]

    assert warned(2, 3) == []
    assert warned(3, 4) == ["algorithm.kl.renew_interval", "trainer.critic.optimizer.warmup"]


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


def test_an_own_algorithm_is_named_in_place_of_what_it_replaces(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text("def advantages(batch):\n    return batch.scores\n")
    [line] = [line for line in lines_of(tmp_path, algorithm={"source": {"file": str(source)}}) if line.startswith("algorithm")]
    assert f"{source} on the preset grpo: own advantages, clip loss" in line
    source.write_text("from elsewhere import loss\n")
    [line] = [line for line in lines_of(tmp_path, algorithm={"source": {"file": str(source)}}) if line.startswith("algorithm")]
    assert "group_norm advantages, own loss" in line
