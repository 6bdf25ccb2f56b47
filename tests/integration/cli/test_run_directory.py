"""The run directory records its owner and its run."""

import subprocess
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, UnavailableError
from polyreme.experience.run import RunState
from polyreme.rundir.run_directory import (
    EMBEDDED,
    RunFile,
    claim,
    differences,
    next_attempt,
    open_run,
    owned,
    read_config,
    read_run_file,
    write_run_file,
)
from support.configs import run_config


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Configuration of a run whose model directory has the files that a replica needs."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "model.safetensors", "chat_template.jinja"):
        (tmp_path / "model" / name).write_text("{}")
    config = run_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    return config


def save_checkpoint(config: RunConfig, iteration: int) -> None:
    """Creates the part of a checkpoint that `claim` reads."""
    (config.run_dir / "checkpoints" / f"iteration-{iteration:06d}").mkdir(parents=True)


async def test_a_resume_with_another_template_is_refused(config: RunConfig, redis: Redis) -> None:
    """The run was trained with its template, and another one would change the task. Before a checkpoint nothing was trained."""
    await open_run(redis, config, None, EMBEDDED)
    template = config.model.path / "chat_template.jinja"
    template.write_text("another")
    await open_run(redis, config, claim(config, resume=True), EMBEDDED)
    save_checkpoint(config, 1)
    template.write_text("a third one")
    with pytest.raises(ConfigError) as caught:
        await open_run(redis, config, claim(config, resume=True), EMBEDDED)
    assert "chat_template.jinja" in caught.value.found
    template.write_text("another")
    await open_run(redis, config, claim(config, resume=True), EMBEDDED)


async def test_a_resume_with_other_data_is_refused(config: RunConfig, redis: Redis) -> None:
    """The order of prompts follows the rows. Before a checkpoint nothing was trained."""
    data = config.data.train
    assert isinstance(data, Path)
    data.write_text('{"prompt": "1"}')
    await open_run(redis, config, None, EMBEDDED)
    data.write_text('{"prompt": "2"}')
    await open_run(redis, config, claim(config, resume=True), EMBEDDED)
    save_checkpoint(config, 1)
    assert claim(config, resume=True) is not None
    data.write_text('{"prompt": "3"}')
    with pytest.raises(ConfigError, match="digest") as caught:
        claim(config, resume=True)
    assert "other content" in caught.value.found
    data.write_text('{"prompt": "2"}')
    assert claim(config, resume=True) is not None


async def test_a_new_run_is_recorded(config: RunConfig, redis: Redis) -> None:
    assert claim(config, resume=False) is None
    run = await open_run(redis, config, None, EMBEDDED)
    assert read_run_file(config.run_dir) == RunFile(run.run_id, EMBEDDED)
    assert read_config(config.run_dir) == config
    assert set(await run.model_files()) == {"config.json", "tokenizer.json", "chat_template.jinja"}


async def test_a_run_with_a_checkpoint_needs_resume_or_another_name(config: RunConfig, redis: Redis) -> None:
    run = await open_run(redis, config, None, EMBEDDED)
    save_checkpoint(config, 0)
    with pytest.raises(ConfigError) as refused:
        claim(config, resume=False)
    assert run.run_id in refused.value.found
    assert claim(config, resume=True) == RunFile(run.run_id, EMBEDDED)


async def test_a_run_without_a_checkpoint_is_replaced_by_the_next(config: RunConfig, redis: Redis) -> None:
    first = await open_run(redis, config, None, EMBEDDED)
    assert claim(config, resume=False) is None
    assert claim(config.model_copy(update={"seed": 1}), resume=True) is None
    assert claim(config, resume=True) == RunFile(first.run_id, EMBEDDED)


def test_resume_without_a_run_starts_one(config: RunConfig) -> None:
    assert claim(config, resume=True) is None


async def test_a_resume_restarts_the_same_run_with_its_new_length(config: RunConfig, redis: Redis) -> None:
    run = await open_run(redis, config, None, EMBEDDED)
    await run.set_state(RunState.FAILED, "by the test")
    longer = config.model_copy(update={"iterations": 2000})
    again = await open_run(redis, longer, claim(longer, resume=True), EMBEDDED)
    assert again.run_id == run.run_id
    assert (await again.state())[0] is RunState.STARTING
    assert (await again.config()).iterations == 2000


async def test_a_resume_with_other_values_is_refused_with_their_keys(config: RunConfig, redis: Redis) -> None:
    await open_run(redis, config, None, EMBEDDED)
    save_checkpoint(config, 0)
    other = config.model_copy(update={"seed": 1, "iterations": 7})
    with pytest.raises(ConfigError) as refused:
        claim(other, resume=True)
    assert refused.value.found.endswith("iterations, seed")


async def test_a_resume_needs_the_run_in_redis(config: RunConfig, redis: Redis) -> None:
    with pytest.raises(UnavailableError):
        await open_run(redis, config, RunFile("gone", EMBEDDED), EMBEDDED)


def test_a_damaged_run_file_is_an_error(config: RunConfig) -> None:
    (config.run_dir / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json"):
        claim(config, resume=True)


def test_attempts_are_numbered(config: RunConfig) -> None:
    assert [next_attempt(config.run_dir).name for _ in range(3)] == ["attempt_1", "attempt_2", "attempt_3"]


_OWN = """
import sys
from pathlib import Path
from polyreme.process.lifecycle import exit_on_error
from polyreme.rundir.run_directory import owned
with exit_on_error("other"), owned(Path(sys.argv[1])):
    print("owned")
"""


def test_one_process_at_a_time_owns_a_directory(config: RunConfig) -> None:
    def other() -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, "-c", _OWN, str(config.run_dir)], capture_output=True, text=True, timeout=300)

    with owned(config.run_dir):
        assert "another process" in other().stderr
    assert other().stdout == "owned\n"


def test_differences_are_dotted_keys(config: RunConfig) -> None:
    other = config.model_copy(update={"seed": 3, "rollout": config.rollout.model_copy(update={"temperature": 0.5})})
    assert differences(config, other) == ["rollout.temperature", "seed"]


@pytest.mark.parametrize("saved", ["warm-start-000050", "step-000004"])
@pytest.mark.parametrize("resume", [False, True])
def test_what_a_warm_start_or_a_stage_saved_is_not_replaced(config: RunConfig, saved: str, resume: bool) -> None:
    """Another run would continue from these weights, whatever its own values are."""
    write_run_file(config.run_dir, RunFile("first-1", EMBEDDED))
    (config.run_dir / "config.yaml").write_text(config.to_yaml())
    (config.run_dir / "checkpoints" / saved).mkdir(parents=True)
    with pytest.raises(ConfigError) as refused:
        claim(config.model_copy(update={"seed": 1}), resume)
    assert "first-1" in f"{refused.value.expected} {refused.value.found}"
