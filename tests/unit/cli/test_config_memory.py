"""`polyreme config check --memory` prints the published arithmetic of large models, without their weights and without allocating."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from polyreme.cli.main import build_app
from support.published import published_config, published_model

GIB = 2**30

PUBLISHED = {
    "Qwen2.5-7B-Instruct": (7_615_616_512, 57_344),
    "Qwen2.5-32B": (32_763_876_352, 262_144),
    "Qwen3-235B-A22B": (235_093_634_560, 192_512),
}
"""Parameters, and bytes of one token's keys and values in bfloat16: 2 x layers x key-value heads x width of a head x 2 bytes."""


def config_file(name: str, folder: Path, make_model: Callable[[str, Path], Path] = published_config) -> Path:
    (folder / "train.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    run = {
        "device": "cuda",
        "iterations": 10,
        "groups_per_iteration": 16,
        "group_size": 4,
        "model": {"path": str(make_model(name, folder / "model")), "dtype": "bfloat16"},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 1024},
        "rollout": {"max_new_tokens": 3072, "max_model_len": 4096},
        "reward": {"rewards": [{"name": "exact"}]},
        "algorithm": {"preset": "grpo"},
        "trainer": {"optimizer": {"lr": 1e-6}},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return folder / "run.yaml"


def check(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(["config"]), ["config", "check", *arguments])
    return result.exit_code, result.output + str(result.exception or "")


@pytest.mark.parametrize(("name", "parameters", "cache"), [(name, *numbers) for name, numbers in PUBLISHED.items()])
def test_each_term_is_published_bytes_of_each_published_parameter(name: str, parameters: int, cache: int, tmp_path: Path) -> None:
    """18 bytes for each parameter of the actor (Rajbhandari et al. 2020, with gradients in float32), 2 for each of the reference."""
    _, output = check(str(config_file(name, tmp_path)), "--memory")
    for each, term in ((2, "actor weights"), (4, "actor gradients"), (12, "actor optimizer"), (2, "reference weights")):
        line = f"  {each * parameters / GIB:>9,.3f}    {term}: {parameters:,} parameters x {each} bytes"
        assert sum(found.startswith(line) for found in output.splitlines()) == 1, output
    assert f"{2 * parameters / GIB:,.3f} GiB of weights" in output and f"at {cache:,} bytes each" in output


def test_an_estimate_needs_only_config_json(tmp_path: Path) -> None:
    file = str(config_file("Qwen2.5-7B-Instruct", tmp_path))
    Path(file).with_name("train.jsonl").unlink()
    code, output = check(file, "--memory")
    assert code == 0, output
    for missing in ("tokenizer.json", "train.jsonl", "a cuda device"):
        assert any(line.startswith("missing") and missing in line for line in output.splitlines()), output
    assert output.rstrip().endswith("except what is missing here")
    assert check(file)[0] != 0, "a start needs them"
    (tmp_path / "model" / "config.json").unlink()
    code, output = check(file, "--memory")
    assert code != 0 and output.count("config.json") >= 1


def test_a_device_that_is_too_small_is_an_error_with_the_sum(tmp_path: Path) -> None:
    file = str(config_file("Qwen2.5-7B-Instruct", tmp_path, published_model))
    code, output = check(file, "--device-gib", "80")
    assert code != 0
    assert "a learner that fits the 80.0 GiB of each device" in output
    assert "actor weights 14.19 + actor gradients 28.37 + actor optimizer 85.11 + reference weights 14.19" in output
    code, output = check(file, "--device-gib", "200")
    assert code == 0 and "checks         passed" in output, output
