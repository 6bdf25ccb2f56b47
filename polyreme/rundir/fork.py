"""A fork is a new run or stage that starts from a copy of another one's newest checkpoint.

Invariant: a fork changes nothing in the parent's directory, and needs nothing from it after the copy.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import yaml

from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.errors import ConfigError
from polyreme.rundir.checkpoint_manifest import is_intact, number_of, read_manifest
from polyreme.rundir.run_directory import Origin, RunFile, checkpoints, no_run, read_run_file, unused
from polyreme.rundir.run_records import read_records

Config = TypeVar("Config", RunConfig, StageConfig)


def plan_fork(config: Config, file_run_dir: Path) -> tuple[Path, Config]:
    """Returns the directory to fork from, and the configuration with the fork's name.

    When the configuration's directory holds a run, that run is the parent and the fork is called NAME-fork-N. Otherwise a `name=`
    override names the fork, and the run of the configuration file is the parent.

    Args:
        config: the resolved configuration, with overrides.
        file_run_dir: run directory of the configuration without a `name=` override.

    Raises:
        ConfigError: neither directory holds a run, or the fork's directory already has checkpoints.
    """
    if read_run_file(config.run_dir) is not None:
        stem, number = re.sub(r"-fork-\d+$", "", config.name), 1
        while (config.output_dir / f"{stem}-fork-{number}").exists():
            number += 1
        return config.run_dir, config.model_copy(update={"name": f"{stem}-fork-{number}"})
    if read_run_file(file_run_dir) is None:
        raise no_run(config.run_dir, "a run to fork in", "Pass name=... of a run, or omit --fork.")
    if checkpoints(config.run_dir, config.checkpoint_prefix):
        raise ConfigError(
            f"an empty fork directory {config.run_dir}", "checkpoints", "Choose another name=..., or remove the directory."
        )
    return file_run_dir, config


def copy_start(parent: Path, config: RunConfig | StageConfig) -> Origin:
    """Copies the newest intact checkpoint into the fork's directory, and the exports that belong to it.

    Raises:
        ConfigError: the parent is running, its newest checkpoint has another format, it has no intact one, or its checkpoint is
            not older than the fork's last iteration or step.
    """
    with unused(parent) as free:
        run_file = read_run_file(parent)
        assert run_file is not None
        if not free:
            raise ConfigError(
                f"run {run_file.run_id} to have ended",
                "it is still running",
                "Stop it first (SIGTERM saves a checkpoint), then fork.",
            )
        prefix = config.checkpoint_prefix
        checkpoint = next((path for path in reversed(checkpoints(parent, prefix)) if is_whole(path)), None)
        if checkpoint is None:
            raise ConfigError(f"an intact checkpoint in {parent / 'checkpoints'}", "none", "Start a new run with name=...")
        number = number_of(checkpoint)
        key, length = (
            ("iterations", config.iterations) if isinstance(config, RunConfig) else ("trainer.steps", config.trainer.steps)
        )
        if length is not None and length <= number:
            raise ConfigError(f"{key} above {number}, that of the parent's checkpoint", str(length), f"Raise {key}.")
        copied: list[Path] = []
        try:
            for path in (checkpoint, *exports_of(parent, config, number)):
                copied.append(config.run_dir / path.relative_to(parent))
                _copy(path, copied[-1])
        except BaseException:
            for path in copied:
                shutil.rmtree(path, ignore_errors=True)
            raise
        group = next_group(parent, run_file, number) if isinstance(config, RunConfig) else 0
        return Origin(run_file.run_id, str(parent), number, group)


def exports_of(parent: Path, config: RunConfig | StageConfig, number: int) -> Iterator[Path]:
    """Hugging Face directories for a checkpoint: its own and version 0's (the reference policy); of a stage the best step's."""
    if isinstance(config, RunConfig):
        paths = [parent / "hf" / f"iteration-{version:06d}" for version in sorted({0, number})]
        yield from (path for path in paths if path.is_dir())
    else:
        best = parent / "hf" / "best"
        if (best / "step").is_file() and int(
            (best / "step").read_text()
        ) <= number:  # a later one is of steps that the fork repeats
            yield best


def next_group(run_dir: Path, run_file: RunFile, iteration: int) -> int:
    """The index of the first group that a run has not trained by the end of `iteration`.

    An iteration without a record (the trainer was killed before it wrote one) counts as `groups_per_iteration` groups.
    """
    origin = run_file.forked_from
    recorded, group = (origin.iteration, origin.group) if origin else (0, 0)
    for record in read_records(run_dir, run_file.run_id):
        if record["kind"] == "iteration" and record["iteration"] <= iteration and "next_group" in record:
            recorded, group = max(recorded, record["iteration"]), max(group, record["next_group"])
    missing = iteration - recorded
    if missing > 0:
        group += missing * int(yaml.safe_load((run_dir / "config.yaml").read_text())["groups_per_iteration"])
    return group


def is_whole(checkpoint: Path) -> bool:
    """Whether neither the checkpoint's manifest nor any of its files is damaged. Raises ConfigError for another format."""
    try:
        return is_intact(checkpoint, read_manifest(checkpoint)["files"])
    except FileNotFoundError:
        return any(checkpoint.iterdir())  # a checkpoint of the simulated engine has no manifest
    except ConfigError:  # raised for another format; it is also a ValueError
        raise
    except (OSError, ValueError):
        return False


def _copy(source: Path, target: Path) -> None:
    """Copies a directory. The copy gets its name only when it is complete."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    partial.rename(target)
