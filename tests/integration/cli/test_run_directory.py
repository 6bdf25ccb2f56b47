"""Who may use a run directory, and what it says of itself."""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from polyreme.cli.run_directory import (
    EMBEDDED,
    RunFile,
    check_inputs,
    claim,
    differences,
    next_attempt,
    open_run,
    owned,
    read_config,
    read_model_files,
    read_run_file,
)
from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, UnavailableError
from polyreme.experience.run import RunState
from support.configs import run_config


def weights(tensors: dict[str, int]) -> bytes:
    """A safetensors file of so many bytes by name."""
    ends = list(itertools.accumulate(tensors.values()))
    header = {
        name: {"dtype": "U8", "shape": [n], "data_offsets": [end - n, end]}
        for (name, n), end in zip(tensors.items(), ends, strict=True)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(sum(tensors.values()))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Of a run whose model directory has the files a replica needs."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "model.safetensors", "chat_template.jinja"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(weights({}))
    config = run_config(tmp_path)
    config.run_dir.mkdir(parents=True)
    return config


def save_checkpoint(config: RunConfig, iteration: int) -> None:
    """As far as a directory's owner looks."""
    (config.run_dir / "checkpoints" / f"iteration-{iteration:06d}").mkdir(parents=True)


async def test_a_resume_with_another_template_is_refused(config: RunConfig, redis: Redis) -> None:
    """The run was trained with it: answers to other prompts would be another task. Before a checkpoint nothing was trained."""
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


async def test_a_new_run_is_written_down(config: RunConfig, redis: Redis) -> None:
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


async def test_a_run_that_ended_before_its_first_checkpoint_leaves_its_directory_to_the_next(
    config: RunConfig, redis: Redis
) -> None:
    first = await open_run(redis, config, None, EMBEDDED)
    assert claim(config, resume=False) is None
    assert claim(config.model_copy(update={"seed": 1}), resume=True) is None
    assert claim(config, resume=True) == RunFile(first.run_id, EMBEDDED)


def test_resume_of_nothing_starts(config: RunConfig) -> None:
    assert claim(config, resume=True) is None


async def test_a_resume_sets_the_same_run_going_again_with_its_new_length(config: RunConfig, redis: Redis) -> None:
    run = await open_run(redis, config, None, EMBEDDED)
    await run.set_state(RunState.FAILED, "the test says so")
    longer = config.model_copy(update={"iterations": 2000})
    again = await open_run(redis, longer, claim(longer, resume=True), EMBEDDED)
    assert again.run_id == run.run_id
    assert (await again.state())[0] is RunState.STARTING
    assert (await again.config()).iterations == 2000


async def test_a_resume_that_would_train_otherwise_is_refused_by_key(config: RunConfig, redis: Redis) -> None:
    await open_run(redis, config, None, EMBEDDED)
    save_checkpoint(config, 0)
    other = config.model_copy(update={"seed": 1, "iterations": 7})
    with pytest.raises(ConfigError, match="other values of iterations, seed"):
        claim(other, resume=True)


async def test_a_resume_on_a_store_without_the_run_says_so(config: RunConfig, redis: Redis) -> None:
    with pytest.raises(UnavailableError):
        await open_run(redis, config, RunFile("gone", EMBEDDED), EMBEDDED)


def test_a_damaged_run_file_is_told(config: RunConfig) -> None:
    (config.run_dir / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json"):
        claim(config, resume=True)


def test_attempts_are_numbered(config: RunConfig) -> None:
    assert [next_attempt(config.run_dir).name for _ in range(3)] == ["attempt_1", "attempt_2", "attempt_3"]


_OWN = """
import sys
from pathlib import Path
from polyreme.process.lifecycle import exit_on_error
from polyreme.cli.run_directory import owned
with exit_on_error("other"), owned(Path(sys.argv[1])):
    print("owned")
"""


def test_one_process_at_a_time_owns_a_directory(config: RunConfig) -> None:
    def other() -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, "-c", _OWN, str(config.run_dir)], capture_output=True, text=True, timeout=300)

    with owned(config.run_dir):
        assert "another process" in other().stderr
    assert other().stdout == "owned\n"


def test_what_the_configuration_names_must_be_there(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train"):
        check_inputs(config)
    (tmp_path / "train.jsonl").touch()
    check_inputs(config)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="weights"):
        check_inputs(config)
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        read_model_files(config.model.path)
    with pytest.raises(ConfigError, match="no such directory"):
        read_model_files(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda whole: whole[:-1], "not what its header says"),
        (lambda whole: whole[:20], "not what its header says"),
        (lambda whole: whole[:3], "not what its header says"),
        (lambda whole: whole + b"x", "not what its header says"),
        (lambda whole: whole.replace(b"data_offsets", b"date_offsets"), "no safetensors header"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1", "not what its header says"),
    ],
)
def test_weights_that_are_not_whole_are_told(
    config: RunConfig, tmp_path: Path, damage: Callable[[bytes], bytes], found: str
) -> None:
    (tmp_path / "train.jsonl").touch()
    whole = weights({"a": 100, "b": 0, "c": 28})
    path = tmp_path / "model" / "model-00001-of-00002.safetensors"
    path.write_bytes(whole)
    check_inputs(config)
    path.write_bytes(damage(whole))
    with pytest.raises(ConfigError, match=f"whole weights in {path}; found .*{found}"):
        check_inputs(config)


def test_differences_are_dotted_keys(config: RunConfig) -> None:
    other = config.model_copy(update={"seed": 3, "rollout": config.rollout.model_copy(update={"temperature": 0.5})})
    assert differences(config, other) == ["rollout.temperature", "seed"]
