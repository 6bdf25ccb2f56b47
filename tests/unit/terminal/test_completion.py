"""The completions that a shell gets."""

import os
import subprocess
import sys

import pytest

from polyreme.cli.main import typed_words
from polyreme.terminal.completion import config_keys, config_values


@pytest.mark.parametrize("variable", ["COMP_WORDS", "_TYPER_COMPLETE_ARGS"])
def test_the_command_that_is_typed_is_the_one_that_is_loaded(variable: str) -> None:
    shell = {"_POLYREME_COMPLETE": "complete_bash", variable: "polyreme up run.yaml --re"}
    assert typed_words([], shell) == ["up", "run.yaml", "--re"]
    assert typed_words(["status"], {variable: "polyreme up"}) == ["status"]


def test_keys_of_the_configuration() -> None:
    assert "trainer.optimizer.lr=" in config_keys("trainer.opt")
    assert config_keys("trainer.optimizer.lr") == ["trainer.optimizer.lr="]
    assert len(config_keys("")) == len(set(config_keys("")))


def test_keys_that_accept_only_some_values() -> None:
    assert "grpo" in config_values("algorithm.preset") and "ppo" in config_values("algorithm.preset")
    assert config_values("device") == ["cpu", "cuda", "npu"]
    assert config_values("data.deduplicate") == ["true", "false"]
    assert {"openrlhf", "null"} <= set(config_values("reward.rewards.0.protocol"))
    assert config_values("trainer.lora.targets") == config_values("iterations") == config_values("no.such.key") == []


@pytest.mark.parametrize(
    ("shell", "line", "word", "found"),
    [
        ("zsh", "polyreme up run.yaml algorithm.preset=gr", "", "algorithm.preset=grpo"),
        ("zsh", "polyreme up run.yaml trainer.optimizer.l", "", "trainer.optimizer.lr="),
        ("bash", "polyreme up run.yaml algorithm.preset = gr", "5", "grpo"),  # bash splits at "="
        ("bash", "polyreme sft run.yaml trainer.recompute =", "4", "full"),
        ("bash", "polyreme dpo run.yaml loss.kind = ki", "5", ""),
        ("bash", "polyreme dpo run.yaml loss.kind = kt", "5", "kto"),
        ("bash", "polyreme init --reward nu", "3", "numeric"),
        ("bash", "polyreme doctor --device cu", "3", "cuda"),
        ("bash", "polyreme up", "1", "upgrade-config"),  # also a whole name may be the beginning of another one
    ],
)
def test_a_shell_gets_values(shell: str, line: str, word: str, found: str) -> None:
    environment = {
        "_POLYREME_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_ARGS": line,
        "COMP_WORDS": line,
        "COMP_CWORD": word,
    }
    command = [sys.executable, "-m", "polyreme"]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False)
    assert (found in result.stdout) if found else not result.stdout.strip(), (result.stdout, result.stderr)
