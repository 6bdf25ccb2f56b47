"""Forks: a new run that starts from a copy of another run's newest checkpoint.

Invariant: nothing below the parent's directory changes, and the fork needs nothing of it once it has begun.
"""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash
import yaml

from polyreme.cli.checks import check_run
from polyreme.cli.run_directory import (
    Origin,
    RunFile,
    checkpoints,
    claim,
    owned,
    read_records,
    read_run_file,
    unused,
)
from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError

_BLOCK = 1 << 24


@dataclass(frozen=True)
class Start:
    """What a command starts.

    Attributes:
        config: of the run; a fork's has the fork's name.
        existing: the run to continue; None: a new one.
        origin: of a fork that begins.
        notices: what the checks remarked.
    """

    config: RunConfig
    existing: RunFile | None = None
    origin: Origin | None = None
    notices: Sequence[str] = ()


@contextmanager
def prepared(path: Path, overrides: list[str], resume: bool, fork: bool, only: str | None = None) -> Iterator[Start]:
    """Reads the configuration, owns the run directory for the block, and decides which run is meant.

    Args:
        only: as `check_run` takes it.

    Raises:
        ConfigError: the configuration or its files are wrong, the directory is in use, or it holds a run and no flag says what to do.
    """
    if resume and fork:
        raise ConfigError("--resume or --fork", "both", "Give one of them.")
    config = load_config(path, overrides)
    notices = check_run(config, only)
    if not fork:
        with owned(config.run_dir):
            yield Start(config, claim(config, resume), notices=notices)
        return
    own_name = load_config(path, [each for each in overrides if not each.startswith("name=")]).run_dir
    parent, config = plan_fork(config, own_name)
    was_there = config.run_dir.exists()
    try:
        with owned(config.run_dir):
            yield Start(config, origin=copy_start(parent, config), notices=notices)
    finally:
        if not was_there and read_run_file(config.run_dir) is None:
            shutil.rmtree(config.run_dir, ignore_errors=True)  # it never began


def plan_fork(config: RunConfig, file_run_dir: Path) -> tuple[Path, RunConfig]:
    """The directory to fork from, and the configuration with the fork's name.

    The configuration's own run is the parent, and the fork is called NAME-fork-N. When there is none, a `name=` override names the
    fork, and the run of the configuration file is the parent.

    Args:
        file_run_dir: run directory of the configuration without a `name=` override.

    Raises:
        ConfigError: neither directory holds a run, or the one that was named holds something else.
    """
    if read_run_file(config.run_dir) is not None:
        stem, number = re.sub(r"-fork-\d+$", "", config.name), 1
        while (config.output_dir / f"{stem}-fork-{number}").exists():
            number += 1
        return config.run_dir, config.model_copy(update={"name": f"{stem}-fork-{number}"})
    if read_run_file(file_run_dir) is None:
        raise ConfigError(f"a run to fork in {config.run_dir}", "no run.json in it", "Give name=... of a run, or drop --fork.")
    if checkpoints(config.run_dir):
        raise ConfigError(
            f"nothing in the fork's directory {config.run_dir} yet", "checkpoints", "Choose another name=..., or remove it."
        )
    return file_run_dir, config


def copy_start(parent: Path, config: RunConfig) -> Origin:
    """Copies what a run starts from into the fork's directory: the newest whole checkpoint, its Hugging Face directory, and that of
    version 0 (the reference policy).

    Raises:
        ConfigError: the parent still runs, has no whole checkpoint, or has trained as many iterations as the fork asks for.
    """
    with unused(parent) as free:
        run_file = read_run_file(parent)
        assert run_file is not None
        if not free:
            raise ConfigError(
                f"run {run_file.run_id} to have ended", "it still runs", "Stop it first (SIGTERM saves), then fork."
            )
        checkpoint = next((path for path in reversed(checkpoints(parent)) if is_whole(path)), None)
        if checkpoint is None:
            raise ConfigError(f"a whole checkpoint in {parent / 'checkpoints'}", "none", "Start a new run with name=...")
        iteration = int(checkpoint.name.removeprefix("iteration-"))
        if config.iterations <= iteration:
            raise ConfigError(
                f"more iterations than the parent's checkpoint has ({iteration})", str(config.iterations), "Raise iterations."
            )
        wanted = [checkpoint, *(parent / "hf" / f"iteration-{version:06d}" for version in sorted({0, iteration}))]
        copied: list[Path] = []
        try:
            for path in (path for path in wanted if path.is_dir()):
                copied.append(config.run_dir / path.relative_to(parent))
                _copy(path, copied[-1])
        except BaseException:
            for path in copied:
                shutil.rmtree(path, ignore_errors=True)
            raise
        return Origin(run_file.run_id, str(parent), iteration, next_group(parent, run_file, iteration))


def next_group(run_dir: Path, run_file: RunFile, iteration: int) -> int:
    """The index after the highest group that a run has trained up to `iteration`.

    Iterations that were killed before they were recorded count as `groups_per_iteration` groups each.
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
    """Whether the files that the checkpoint's manifest names have the xxh3_64 digests that it gives."""
    try:
        text = (checkpoint / "checkpoint.json").read_text()
    except FileNotFoundError:
        return any(checkpoint.iterdir())  # a simulated learner's has no manifest
    try:
        files = json.loads(text)["files"]
        return bool(files) and all(_digest(checkpoint / name) == digest for name, digest in files.items())
    except (ValueError, LookupError, TypeError, AttributeError, OSError):
        return False


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _copy(source: Path, target: Path) -> None:
    """The copy appears under its name when it is complete."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial)
    partial.rename(target)
