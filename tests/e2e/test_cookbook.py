"""The recipes of tinker-cookbook, unmodified, train on a training service with megatron's learner, and except for two of them with vLLM."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.cookbook import MODEL, SUM_BATCHES, SUMS_PER_BATCH
from support.own_venv import own_venv
from support.service import QUIET, TESTS, Program, Service, service

pytestmark = pytest.mark.real
Steps = list[dict[str, Any]]


class Cookbook:
    """A running service, and the folder in which recipes find its model and their data."""

    def __init__(self, running: Service, work: Path, commands: Path) -> None:
        self.running, self.work, self._commands = running, work, commands

    def run(self, recipe: str, **options: Any) -> Steps:
        """Runs a recipe to its end. Returns its metrics, step by step."""
        log = self.log(recipe)
        given = {"model_name": MODEL, "log_path": log, **options}
        words = [f"{key}={value}" for key, value in given.items()]
        command = [str(self._commands / "python"), "-W", "ignore", "-m", f"tinker_cookbook.recipes.{recipe}", *words]
        offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "HF_DATASETS_CACHE": str(self.work / "cache")}
        ours = {"TINKER_API_KEY": "tml-any", "TINKER_BASE_URL": self.running.url, "TINKER_TELEMETRY": "0"}
        Program(command, self.work, {**offline, **ours}, self.work / f"{recipe}.log").ended(1800.0)
        return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]

    def log(self, recipe: str) -> Path:
        return self.work / f"log-{recipe}"


@contextmanager
def cookbook(folder: Path, commands: Path, engine: str) -> Iterator[Cookbook]:
    work = folder / "work"
    work.mkdir()
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(TESTS)}
    subprocess.run([sys.executable, "-m", "support.cookbook", work], check=True, env=environment, timeout=1800)
    with service(folder, work / MODEL, MODEL, 1024, engine) as running:
        yield Cookbook(running, work, commands)


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_venv("tinker-cookbook", tmp_path_factory.mktemp("cookbook"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, commands: Path) -> Iterator[Cookbook]:
    with cookbook(tmp_path_factory.mktemp("small"), commands, "transformers") as world:
        yield world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, commands: Path) -> Iterator[Cookbook]:
    with cookbook(tmp_path_factory.mktemp("service"), commands, "vllm") as started:
        yield started


@pytest.fixture(scope="module")
def rl_loop(world: Cookbook) -> Steps:
    """One digit of ten is right. The trained model is also the teacher of the distillation."""
    options = {"batch_size": 4, "group_size": 8, "max_tokens": 8, "learning_rate": 0.002, "save_every": 10, "max_steps": 20}
    return world.run("rl_loop", lora_rank=8, **options)


def means(steps: Steps, name: str, first: int, last: int) -> tuple[float, float]:
    """The means of a metric over the first and over the last steps."""
    found: Sequence[float] = [step[name] for step in steps]
    return float(np.mean(found[:first])), float(np.mean(found[-last:]))


def test_sl_loop_learns_the_chats(small: Cookbook) -> None:
    """The loss falls from about 10 to about 5 nats a token."""
    steps = small.run("sl_loop", lora_rank=8, batch_size=4, max_length=256, learning_rate=0.01, save_every=5)
    losses = [step["train_mean_nll"] for step in steps]
    assert len(losses) == 12
    assert losses[0] > 8 and losses[-1] < 6, losses


def test_dpo_prefers_the_chosen_answers(small: Cookbook) -> None:
    """The loss falls from 0.69 to 0.32, and every pair's chosen answer is preferred."""
    options = {"dataset": "hhh", "renderer_name": "qwen3", "batch_size": 8, "max_length": 256, "max_steps": 10}
    steps = small.run("preference.dpo.train", learning_rate=0.001, **options)
    assert steps[0]["dpo_loss"] == pytest.approx(np.log(2), abs=1e-3)
    assert steps[-1]["dpo_loss"] < 0.45 and steps[-1]["accuracy"] == 1.0, steps


@pytest.mark.slow
def test_rl_loop_learns_the_answer(rl_loop: Steps) -> None:
    """The reward rises from 0.1 to 0.9."""
    before, after = means(rl_loop, "reward/total", 2, 5)
    assert len(rl_loop) == 20 and before < 0.35 and after > 0.7, (before, after)


@pytest.mark.slow
def test_arithmetic_learns_to_answer_its_sums(world: Cookbook) -> None:
    """The model knows the sums, and answers half of them with 0: the right answers rise from 0.47 to 0.77."""
    options = {
        "env": "arithmetic",
        "groups_per_batch": SUMS_PER_BATCH,
        "group_size": 64,
        "max_tokens": 6,
        "max_steps": SUM_BATCHES,
    }
    steps = world.run("math_rl.train", lora_rank=8, learning_rate=0.001, eval_every=0, save_every=0, **options)
    before, after = means(steps, "env/all/correct", 2, 4)
    assert len(steps) == SUM_BATCHES and before < 0.65 and after > before + 0.15, (before, after)


@pytest.mark.slow
def test_guess_number_learns_the_form_of_a_guess(world: Cookbook) -> None:
    """Each of ten turns costs 1 if it has another form: the reward rises from -9.8 to about -3.5."""
    options = {"renderer_name": "qwen3", "group_size": 4, "batch_size": 4, "max_tokens": 10, "max_steps": 8}
    steps = world.run("multiplayer_rl.guess_number.train", learning_rate=0.003, eval_every=0, save_every=0, **options)
    before, after = means(steps, "env/all/reward/total", 1, 3)
    assert len(steps) == 8 and before < -8 and after > before + 3, (before, after)


@pytest.mark.slow
def test_tic_tac_toe_learns_to_play_on(world: Cookbook) -> None:
    """The model plays against itself, so that a won game gives 0 on average. A move that is not allowed costs its player 2 and ends the game, as
    nearly every game at first: the mean reward rises from -0.95 to -0.6, and a player's moves from 2 to 3."""
    options = {"renderer_name": "qwen3", "batch_size": 16, "num_train_datapoints": 320, "num_test_datapoints": 4, "max_tokens": 6}
    steps = world.run("multiplayer_rl.text_arena.train", learning_rate=0.002, eval_every=0, save_every=0, **options)
    before, after = means(steps, "env/all/reward/total", 5, 10)
    assert len(steps) == 20 and before < -0.85 and after > before + 0.2, (before, after)
    before, after = means(steps, "env/all/turns_per_episode", 5, 10)
    assert before < 2.4 and after > 1.2 * before, (before, after)


@pytest.mark.slow
def test_distillation_learns_the_teachers_answers(world: Cookbook, rl_loop: Steps) -> None:
    """The teacher is what rl_loop has trained; the KL to it falls from 0.8 to below 0.1."""
    saved = [json.loads(line) for line in (world.log("rl_loop") / "checkpoints.jsonl").read_text().splitlines()]
    teacher = [each["sampler_path"] for each in saved if "sampler_path" in each][-1]
    options = {"renderer_name": "qwen3", "teacher_model": MODEL, "teacher_checkpoint": teacher, "dataset": "deepmath"}
    sizes = {"group_size": 4, "groups_per_batch": 8, "max_tokens": 8, "max_steps": 15, "lora_rank": 8}
    recipe = "distillation.on_policy_distillation"
    steps = world.run(recipe, learning_rate=0.002, eval_every=0, save_every=0, **options, **sizes)
    before, after = means(steps, "teacher_kl", 2, 3)
    assert len(steps) == 15 and after < 0.5 * before, (before, after)
