"""A fork has its own name, directory and start, and does not change its parent."""

import hashlib
import json
import shutil
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from polyreme.config.load import load_config, load_stage
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.errors import ConfigError
from polyreme.rundir import checkpoint_manifest
from polyreme.rundir.checkpoint_manifest import write_manifest
from polyreme.rundir.fork import is_whole, plan_fork
from polyreme.rundir.run_directory import EMBEDDED, Origin, RunFile, open_stage, owned, read_run_file
from polyreme.rundir.start import Start, prepared, start_of
from support.stages import stage_config, write_data, write_model


def tree_digest(folder: Path) -> dict[str, str]:
    """The digest of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def save(run_dir: Path, iteration: int) -> Path:
    """Writes a checkpoint with its Hugging Face directory, in the learner's layout."""
    for folder, name in (("checkpoints", "state-0.pt"), ("hf", "model.safetensors")):
        path = run_dir / folder / f"iteration-{iteration:06d}"
        path.mkdir(parents=True)
        (path / name).write_bytes(b"%s of %d" % (folder.encode(), iteration))
    checkpoint = run_dir / "checkpoints" / f"iteration-{iteration:06d}"
    digest = xxhash.xxh3_64(b"checkpoints of %d" % iteration).hexdigest()
    write_manifest(checkpoint, iteration, {"tensor": 1}, {"term": 1}, {"state-0.pt": digest})
    return checkpoint


@pytest.fixture
def parent(config_file: Path) -> RunConfig:
    """A run that ended after iteration 6, with checkpoints of 0, 4 and 6. Every iteration trained four groups, and 5 also dropped three."""
    config = load_config(config_file)
    config.run_dir.mkdir(parents=True)
    (config.run_dir / "lock").touch()
    (config.run_dir / "config.yaml").write_text(config.to_yaml())
    (config.run_dir / "run.json").write_text(json.dumps({"run_id": "run-1", "redis": EMBEDDED}))
    for iteration in (0, 4, 6):
        save(config.run_dir, iteration)
    ends = {1: 4, 2: 8, 3: 12, 4: 16, 5: 23, 6: 27}
    lines = [{"run": "run-1", "kind": "iteration", "iteration": number, "next_group": end} for number, end in ends.items()]
    (config.run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return config


def test_a_fork_has_its_own_directory_and_leaves_its_parent_as_it_was(parent: RunConfig, config_file: Path) -> None:
    before = tree_digest(parent.run_dir)
    with prepared(config_file, ["trainer.optimizer.lr=5e-4"], resume=False, fork=True) as start:
        assert start.config.name == "run-fork-1"
        assert start.config.trainer.optimizer.lr == 5e-4
        assert start.existing is None
        assert start.origin == Origin("run-1", str(parent.run_dir), 6, 27)
        copied = {str(path.relative_to(start.config.run_dir)) for path in start.config.run_dir.rglob("iteration-*")}
        assert copied == {"checkpoints/iteration-000006", "hf/iteration-000000", "hf/iteration-000006"}
        assert is_whole(start.config.run_dir / "checkpoints" / "iteration-000006")
        (start.config.run_dir / "checkpoints" / "iteration-000006" / "state-0.pt").write_bytes(b"the fork's own")
        (start.config.run_dir / "run.json").write_text(json.dumps({"run_id": "run-2", "redis": EMBEDDED}))
    assert tree_digest(parent.run_dir) == before
    with prepared(config_file, [], resume=False, fork=True) as start:
        assert start.config.name == "run-fork-2"


def test_a_fork_that_never_began_leaves_nothing(parent: RunConfig, config_file: Path) -> None:
    with pytest.raises(KeyboardInterrupt), prepared(config_file, [], resume=False, fork=True):
        raise KeyboardInterrupt
    assert [path.name for path in parent.output_dir.iterdir()] == ["run"]


def test_a_name_that_is_free_names_the_fork_of_the_file_s_run(parent: RunConfig, config_file: Path) -> None:
    with prepared(config_file, ["name=warmer"], resume=False, fork=True) as start:
        assert start.config.run_dir == parent.output_dir / "warmer"
        assert start.origin is not None and start.origin.run_dir == str(parent.run_dir)


def test_forks_of_forks_are_numbered_on_from_the_first(parent: RunConfig) -> None:
    fork = parent.model_copy(update={"name": "run-fork-1"})
    fork.run_dir.mkdir()
    (fork.run_dir / "run.json").write_text(json.dumps({"run_id": "run-2", "redis": EMBEDDED}))
    found, config = plan_fork(fork, fork.run_dir)
    assert (found, config.name) == (fork.run_dir, "run-fork-2")


def test_a_damaged_checkpoint_is_passed_over(parent: RunConfig, config_file: Path) -> None:
    (parent.run_dir / "checkpoints" / "iteration-000006" / "state-0.pt").write_bytes(b"checkpoints of 7")
    with prepared(config_file, [], resume=False, fork=True) as start:
        assert start.origin == Origin("run-1", str(parent.run_dir), 4, 16)


def test_a_checkpoint_of_another_format_is_refused_by_name(
    parent: RunConfig, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(checkpoint_manifest, "_FORMAT", 4)
        checkpoint = save(parent.run_dir, 7)
    with pytest.raises(ConfigError) as refused, prepared(config_file, ["iterations=9"], resume=False, fork=True):
        pass
    assert "format 4" in refused.value.found and str(checkpoint) in refused.value.found


def test_a_checkpoint_with_any_flipped_byte_is_passed_over(parent: RunConfig) -> None:
    checkpoint = parent.run_dir / "checkpoints" / "iteration-000006"
    assert is_whole(checkpoint)
    for file in (checkpoint / "checkpoint.json", checkpoint / "state-0.pt"):
        whole = file.read_bytes()
        for position in range(len(whole)):
            file.write_bytes(whole[:position] + bytes([whole[position] ^ 0x11]) + whole[position + 1 :])
            assert not is_whole(checkpoint), f"byte {position} of {file.name} is not covered"
        file.write_bytes(whole)


def test_iterations_that_were_not_recorded_count_by_their_size(parent: RunConfig, config_file: Path) -> None:
    metrics = parent.run_dir / "metrics.jsonl"
    metrics.write_text("".join(line + "\n" for line in metrics.read_text().splitlines()[:4]))
    with prepared(config_file, [], resume=False, fork=True) as start:
        assert start.origin is not None
        assert start.origin.group == 16 + 2 * parent.groups_per_iteration


def test_a_fork_of_a_fork_counts_on_from_where_that_began(parent: RunConfig, config_file: Path) -> None:
    origin: dict[str, Any] = {"run_id": "run-0", "run_dir": "elsewhere", "iteration": 4, "group": 40}
    (parent.run_dir / "run.json").write_text(json.dumps({"run_id": "run-1", "redis": EMBEDDED, "forked_from": origin}))
    (parent.run_dir / "metrics.jsonl").write_text("")
    assert read_run_file(parent.run_dir) == RunFile("run-1", EMBEDDED, forked_from=Origin(**origin))
    with prepared(config_file, [], resume=False, fork=True) as start:
        assert start.origin is not None
        assert start.origin.group == 40 + 2 * parent.groups_per_iteration


@pytest.mark.parametrize(
    ("overrides", "found"), [(["iterations=6"], "6"), (["name=nothing", "output_dir=elsewhere"], "no such directory")]
)
def test_what_cannot_be_forked(parent: RunConfig, config_file: Path, overrides: list[str], found: str) -> None:
    with pytest.raises(ConfigError) as error, prepared(config_file, overrides, resume=False, fork=True):
        pass
    assert error.value.found == found


def test_a_run_without_a_whole_checkpoint_cannot_be_forked(parent: RunConfig, config_file: Path) -> None:
    for path in (parent.run_dir / "checkpoints").glob("*/checkpoint.json"):
        path.write_text("{")
    with pytest.raises(ConfigError), prepared(config_file, [], resume=False, fork=True):
        pass
    assert not (parent.output_dir / "run-fork-1").exists()


def test_a_running_run_cannot_be_forked(parent: RunConfig, config_file: Path) -> None:
    with owned(parent.run_dir), pytest.raises(ConfigError) as error, prepared(config_file, [], resume=False, fork=True):
        pass
    assert "running" in error.value.found


def test_resume_and_fork_exclude_each_other(parent: RunConfig, config_file: Path) -> None:
    with pytest.raises(ConfigError) as error, prepared(config_file, [], resume=True, fork=True):
        pass
    assert error.value.found == "both"


@pytest.fixture
def stage_file(tmp_path: Path) -> Path:
    """A stage that ended after step 6, with checkpoints of 2, 4 and 6, and the best held-out loss at step 4."""
    folder = write_model(tmp_path).parent
    write_data(folder)
    config = stage_config(folder, "sft")
    file = folder / "sft.yaml"
    file.write_text(config.to_yaml())
    config.run_dir.mkdir(parents=True)
    open_stage(config, None)
    (config.run_dir / "lock").touch()
    for step in (2, 4, 6):
        path = config.run_dir / "checkpoints" / f"step-{step:06d}"
        path.mkdir(parents=True)
        (path / "state").write_text(str(step))
    (config.run_dir / "hf" / "best").mkdir(parents=True)
    (config.run_dir / "hf" / "best" / "step").write_text("4\n")
    return file


def forked_stage(file: Path, *overrides: str) -> AbstractContextManager[Start[StageConfig]]:
    return start_of(partial(load_stage, file, stage="sft"), overrides, resume=False, fork=True)


def test_a_stage_is_forked_with_other_values(stage_file: Path) -> None:
    parent = stage_file.parent / "runs" / "sft"
    before = tree_digest(parent)
    with forked_stage(stage_file, "trainer.steps=9", "trainer.optimizer.lr=5e-4") as start:
        found = open_stage(start.config, start.existing, start.origin)
        assert (start.config.name, start.config.trainer.optimizer.lr) == ("sft-fork-1", 5e-4)
        assert found.forked_from is not None and (found.forked_from.run_dir, found.forked_from.iteration) == (str(parent), 6)
        copied = {str(path.relative_to(start.config.run_dir)) for path in start.config.run_dir.glob("*/*")}
        assert copied == {"checkpoints/step-000006", "hf/best"}
    assert tree_digest(parent) == before


def test_a_best_export_of_a_later_step_stays(stage_file: Path) -> None:
    shutil.rmtree(stage_file.parent / "runs" / "sft" / "checkpoints" / "step-000006")
    (stage_file.parent / "runs" / "sft" / "hf" / "best" / "step").write_text("6\n")
    with forked_stage(stage_file) as start:
        assert start.origin is not None and start.origin.iteration == 4
        assert not (start.config.run_dir / "hf").exists()


def test_a_fork_of_a_stage_needs_more_steps(stage_file: Path) -> None:
    with pytest.raises(ConfigError) as error, forked_stage(stage_file):
        pass
    assert error.value.expected == "trainer.steps above 6, that of the parent's checkpoint"
    assert not (stage_file.parent / "runs" / "sft-fork-1").exists()
