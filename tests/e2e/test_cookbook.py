"""The recipes of tinker-cookbook, unmodified, train on a training service with megatron's learner."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cookbook import MODEL
from support.own_venv import own_venv
from support.service import QUIET, TESTS, Program, Service, service

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_venv("tinker-cookbook", tmp_path_factory.mktemp("cookbook"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Path]]:
    """A running service, and the folder in which recipes find its model and their data."""
    folder = tmp_path_factory.mktemp("service")
    work = folder / "work"
    work.mkdir()
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(TESTS)}
    subprocess.run([sys.executable, "-m", "support.cookbook", work], check=True, env=environment, timeout=900)
    with service(folder, work / MODEL, MODEL, 1024) as running:
        yield running, work


def run_recipe(commands: Path, world: tuple[Service, Path], name: str, **options: Any) -> list[dict[str, Any]]:
    """Runs a recipe to its end. Returns its metrics, step by step."""
    running, work = world
    log = work / f"log-{name}"
    words = [f"{key}={value}" for key, value in {"model_name": MODEL, "log_path": log, "lora_rank": 8, **options}.items()]
    command = [str(commands / "python"), "-W", "ignore", "-m", f"tinker_cookbook.recipes.{name}", *words]
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "HF_DATASETS_CACHE": str(work / "cache")}
    ours = {"TINKER_API_KEY": "tml-any", "TINKER_BASE_URL": running.url, "TINKER_TELEMETRY": "0"}
    Program(command, work, {**offline, **ours}, work / f"{name}.log").ended(1800.0)
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_sl_loop_learns_the_chats(commands: Path, world: tuple[Service, Path]) -> None:
    """The loss falls from about 11 to below 6 nats a token."""
    steps = run_recipe(commands, world, "sl_loop", batch_size=4, max_length=256, learning_rate=0.01, save_every=5)
    losses = [step["train_mean_nll"] for step in steps]
    assert len(losses) == 12
    assert losses[0] > 9 and losses[-1] < 6, losses


def test_rl_loop_learns_the_answer(commands: Path, world: tuple[Service, Path]) -> None:
    """One digit of ten is right: the reward rises from about 0.14 to about 0.27, where it stays at this learning rate."""
    options = {"batch_size": 8, "group_size": 16, "max_tokens": 12, "learning_rate": 0.004, "save_every": 10, "max_steps": 60}
    steps = run_recipe(commands, world, "rl_loop", **options)
    rewards = [step["reward/total"] for step in steps]
    assert len(rewards) == 60
    assert sum(rewards[:3]) / 3 < 0.2 and sum(rewards[-20:]) / 20 > 0.22, rewards
