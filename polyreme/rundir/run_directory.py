"""The run directory: which run it holds, which process owns it, and where its files are.

Invariant: a directory holds one run. `run.json` names it and is written when the run's record in Redis exists. One process at a
time owns the directory, by a lock that ends with the process. A run with a checkpoint continues only with `--resume`; a fork (see
`fork`) gets its own directory.
"""

import difflib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml
from redis.asyncio import Redis

from polyreme.config.base import BaseConfig
from polyreme.config.load import load_any, parse
from polyreme.config.named_input import NamedInput
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.config.yaml_text import load_yaml
from polyreme.dataset.source import digest_of
from polyreme.errors import ConfigError
from polyreme.experience.embedded_redis import embedded_url
from polyreme.experience.metric_records import Started
from polyreme.experience.run import Run
from polyreme.net.seal import SEAL
from polyreme.rundir.checkpoint_manifest import WARM_START, numbered
from polyreme.rundir.input_files import read_model_files
from polyreme.rundir.run_records import write_atomically
from polyreme.rundir.start_day import dated, first_day

Settings = dict[str, Any]
"""What a run's config.yaml has, of this or another release."""

EMBEDDED = "embedded"
NO_REDIS = ""
"""The value of `redis` in run.json of a stage, which uses no Redis."""

_YAML_LOADER = getattr(
    yaml, "CSafeLoader", yaml.SafeLoader
)  # libyaml's loader is ten times faster, which matters for a page of many runs

_PREFIXES = (RunConfig.checkpoint_prefix, WARM_START, StageConfig.checkpoint_prefix)
"""Of all checkpoints. Another run would continue those of a warm start, and replace the exports of a stage."""

_NAMES = 8
"""Maximum number of runs that an error names."""

Config = TypeVar("Config", bound=BaseConfig)


@dataclass(frozen=True)
class Origin:
    """A fork's origin: parent, its directory, the checkpoint's iteration (of a stage: step), and a run log's first group."""

    run_id: str
    run_dir: str
    iteration: int
    group: int


@dataclass(frozen=True)
class RunFile:
    """Contents of `run.json`.

    Attributes:
        run_id: id of the run.
        redis: URL of the run's Redis, or "embedded" for the run's own Redis in the directory's redis/.
        redis_url: address of that Redis at the newest start, without a password.
        forked_from: origin of the run if it is a fork.
        data: digest of the training data, as `digest_of` returns it.
        replicas: URL of the OpenAI-compatible /v1 by replica id, for the registered replicas.
    """

    run_id: str
    redis: str
    redis_url: str = ""
    forked_from: Origin | None = None
    data: str = ""
    replicas: Mapping[str, str] = field(default_factory=dict)


def claim(config: RunConfig | StageConfig, resume: bool) -> RunFile | None:
    """Decides whether a start in the configuration's directory continues its run.

    Args:
        config: configuration of the run to start.
        resume: continue the directory's run from its newest checkpoint and its log. Without such a run, start a new one.

    Returns:
        The run to continue, or None for a new run. A run that ended before its first checkpoint is replaced by the next run.

    Raises:
        ConfigError: the directory holds a run with a checkpoint and `resume` is not set, or the run used other values or data.
    """
    existing = read_run_file(config.run_dir)
    saved = any(checkpoints(config.run_dir, prefix) for prefix in _PREFIXES)
    if existing is None or not (resume or saved):
        return None
    if not resume:
        raise ConfigError(
            f"no run in the run directory {config.run_dir}",
            f"run {existing.run_id}",
            "Add --resume to continue it, or name=... to start another run. "
            "--fork starts a new run in a new directory from a copy of its newest checkpoint.",
        )
    before = dated(_read_config(config.run_dir, type(config)), first_day(config.run_dir, existing.run_id))
    config = dated(config, before.data.date)
    if before.fingerprint() != config.fingerprint():
        if not saved:
            return None
        raise ConfigError(
            f"the configuration that run {existing.run_id} was trained with",
            "other values of " + ", ".join(differences(before, config)),
            "Resume with the same values, or use --fork to start a new run with other values from a copy of its checkpoint.",
        )
    now = digest_of(config.data.train) if existing.data and saved else existing.data
    if now not in ("", existing.data):
        raise ConfigError(
            f"the training data that run {existing.run_id} was trained with (digest {existing.data})",
            f"other content at the same path (digest {now})",
            "Restore the files, or use --fork to start a new run with other data from a copy of its checkpoint.",
        )
    return existing


def checkpoints(run_dir: Path, prefix: str = RunConfig.checkpoint_prefix) -> list[Path]:
    """The directory's complete checkpoints, oldest first. Does not read their content."""
    return numbered(run_dir / "checkpoints", prefix)


async def open_run(
    redis: Redis, config: RunConfig, existing: RunFile | None, store: str, redis_url: str = "", origin: Origin | None = None
) -> Run:
    """Creates the run's record in Redis, or reopens the existing one, and writes config.yaml and run.json. This process and those
    that it starts keep to the record as it is now (`seal`).

    Args:
        redis: client of the run's Redis.
        config: the resolved configuration.
        existing: the run to continue, or None for a new run.
        store: `redis` of run.json: a URL, or EMBEDDED.
        redis_url: `redis_url` of run.json.
        origin: origin of a new fork.

    Raises:
        UnavailableError: Redis does not have the existing run.
        ConfigError: the existing run was trained with another tokenizer, chat template or architecture.
    """
    files = read_model_files(config.model.path)
    if existing is None:
        run = await Run.create(redis, new_run_id(config), config, files, first_group=origin.group if origin else 0)
        found = RunFile(run.run_id, store, redis_url, origin, digest_of(config.data.train))
    else:
        data = existing.data
        if checkpoints(config.run_dir):
            _check_same_files(await Run(redis, existing.run_id).model_files(), files, config)
        else:
            data = digest_of(config.data.train)
        run = await Run.resume(redis, existing.run_id, config, files)
        found = replace(existing, data=data, redis=store, redis_url=redis_url, replicas={})
    os.environ[SEAL] = run.seal
    write_atomically(config.run_dir / "config.yaml", config.to_yaml())
    write_run_file(config.run_dir, found)
    await run.emit(Started(start=run.start, forked_from=asdict(origin) if origin else None))
    return run


def open_stage(config: StageConfig, existing: RunFile | None, origin: Origin | None = None) -> RunFile:
    """Writes config.yaml and run.json of a stage. Returns the content of run.json. `origin`: of a new fork."""
    found = existing or RunFile(new_run_id(config), NO_REDIS, forked_from=origin, data=digest_of(config.data.train))
    write_atomically(config.run_dir / "config.yaml", config.to_yaml())
    write_run_file(config.run_dir, found)
    return found


def _check_same_files(before: Mapping[str, bytes], now: Mapping[str, bytes], config: RunConfig) -> None:
    """Raises ConfigError when a run in Redis was trained with other small files of the model."""
    changed = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    if before and changed:
        raise ConfigError(
            f"the files in {config.model.path} as the run was trained with them: tokenizer, template, architecture",
            f"another {' and '.join(changed)}",
            "Restore them. With other files, --fork starts a run in a new directory from a copy of its checkpoint.",
        )


def new_run_id(config: BaseConfig) -> str:
    """A unique run id, the prefix of Redis keys and of names of shared memory."""
    return f"{config.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Creates the directory if needed and locks it for this process until the block or the process ends.

    Raises:
        ConfigError: another process owns it, or it is not writable.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"a writable run directory {run_dir}", str(error), "Set output_dir.") from None
    try:
        if not _lock(descriptor, fcntl.LOCK_EX):
            raise ConfigError(
                f"exclusive use of {run_dir}", "another process that uses it", "Wait for it, stop it, or choose another name=..."
            )
        yield
    finally:
        os.close(descriptor)


@contextmanager
def unused(run_dir: Path) -> Iterator[bool]:
    """Whether no process owns the directory. If so, none can until the block ends. Writes nothing."""
    try:
        descriptor = os.open(run_dir / "lock", os.O_RDONLY)
    except FileNotFoundError:
        yield True
        return
    try:
        yield _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_run_file(run_dir: Path) -> RunFile | None:
    """The directory's run, or None. Raises ConfigError when run.json is damaged."""
    path = run_dir / "run.json"
    try:
        fields = json.loads(path.read_text())
        origin = fields.pop("forked_from", None)
        return RunFile(**fields, forked_from=Origin(**origin) if origin else None)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"a readable run record in {path}", error.strerror or str(error), "Check its owner and mode.") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"a valid run record in {path}", str(error), "Restore the file, or choose another name=...") from None


def redis_of(run_dir: Path, found: RunFile) -> str:
    """The URL of the run's Redis, perhaps with a password, for clients in this process.

    Raises:
        StoreError: the run's own Redis belongs to another user.
    """
    return embedded_url(run_dir / "redis", found.redis_url) if found.redis == EMBEDDED else found.redis


def no_run(run_dir: Path, wanted: str = "a run directory at", do: str = "Pass output_dir/name of a run.") -> ConfigError:
    """The error of a directory without a run. It names the runs in it or beside it, and the one with the most similar name."""
    there = "no run.json in it" if run_dir.is_dir() else "a file" if run_dir.exists() else "no such directory"
    for folder in (run_dir, run_dir.parent):
        names = sorted(path.parent.name for path in folder.glob("*/run.json"))
        if names:
            near = (
                difflib.get_close_matches(run_dir.name, names, n=1) if folder == run_dir.parent else names[:1] * (len(names) == 1)
            )
            shown = ", ".join([*near, *(name for name in names if name not in near)][:_NAMES]) + ", ..." * (len(names) > _NAMES)
            advice = f"Did you mean {folder / near[0]}? " if near else ""
            return ConfigError(f"{wanted} {run_dir}", f"{there}; the runs in {folder} are {shown}", advice + do)
    return ConfigError(f"{wanted} {run_dir}", there, do)


def check_resumable(config: RunConfig | StageConfig) -> None:
    """Raises ConfigError when the configuration's directory has no run, so that a misspelt name does not start a new one."""
    if read_run_file(config.run_dir) is None:
        advice = "Pass name=... of a run; without --resume a new run starts."
        error = no_run(config.run_dir, do=advice)
        raise ConfigError(f"a run to resume in {config.run_dir}", error.found, error.do)


def write_replicas(run_dir: Path, run_id: str, replicas: Mapping[str, str]) -> None:
    """Writes the registered replicas to run.json if it belongs to this run."""
    found = read_run_file(run_dir)
    if found is not None and found.run_id == run_id:
        write_run_file(run_dir, replace(found, replicas=replicas))


def write_run_file(run_dir: Path, content: RunFile) -> None:
    """Writes run.json."""
    write_atomically(run_dir / "run.json", json.dumps(asdict(content), indent=1) + "\n")


def read_config(run_dir: Path) -> RunConfig:
    """The resolved configuration of the newest start of the directory's run. Raises ConfigError when it is missing or damaged."""
    return _read_config(run_dir, RunConfig)


def read_stage_config(run_dir: Path) -> StageConfig:
    """The resolved configuration of the newest start of the directory's stage. Raises ConfigError."""
    return _read_config(run_dir, StageConfig)


def read_settings(run_dir: Path) -> Settings:
    """The values in the directory's config.yaml, unchecked, so that those of another release can be read; {} without the file.

    Raises:
        ConfigError: the file is damaged.
    """
    path = run_dir / "config.yaml"
    try:
        return dict(load_yaml(path.read_text(), str(path), _YAML_LOADER) or {})
    except FileNotFoundError:
        return {}
    except (yaml.YAMLError, ConfigError, ValueError, TypeError) as error:
        raise ConfigError(f"valid YAML in {path}", str(error), "Restore the file.") from None


def read_names(run_dir: Path) -> list[NamedInput]:
    """The repositories behind the names of the directory's configuration; empty without any."""
    return [parse(each, str(run_dir / "config.yaml"), NamedInput) for each in read_settings(run_dir).get("names", [])]


def _read_config(run_dir: Path, kind: type[Config]) -> Config:
    config = load_any(run_dir / "config.yaml")
    if not isinstance(config, kind):
        found = f"the stage {config.stage}" if isinstance(config, StageConfig) else "a run with rollouts"
        raise ConfigError(f"a run of the same kind in {run_dir}", found, "Choose another name=...")
    return config


def differences(before: BaseConfig, after: BaseConfig) -> list[str]:
    """The dotted keys whose values differ, sorted."""
    old, new = (flat_settings(each.by_name(each.model_dump(mode="json"))) for each in (before, after))
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def changed_settings(run_dir: Path) -> list[str] | None:
    """Dotted keys of a directory's config.yaml whose values are not the defaults, sorted; None if this release cannot read it."""
    try:
        config = load_any(run_dir / "config.yaml")
    except ConfigError:
        return None
    return sorted(flat_settings(config.model_dump(mode="json", exclude_defaults=True)))


def flat_settings(tree: Mapping[str, object]) -> dict[str, object]:
    """A configuration's values by dotted key. Sections in lists have numbers: reward.rewards.0.weight. Other lists are values."""
    return _flat(dict(tree))


def make_folder(path: Path, option: str) -> Path:
    """Creates a folder that an option names, if missing, and returns it. Raises ConfigError when it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"a folder at {path}", error.strerror or str(error), f"Fix {option}.") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"a folder at {path} that this user can write to", "no permission", f"Fix {option}.")
    return path


def next_attempt(run_dir: Path) -> Path:
    """Creates and returns the next free logs/attempt_N."""
    attempt = 1
    while True:
        folder = run_dir / "logs" / f"attempt_{attempt}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            attempt += 1


def _flat(tree: object, prefix: str = "") -> dict[str, object]:
    if isinstance(tree, list | tuple) and tree and all(isinstance(value, dict) for value in tree):
        tree = {str(place): value for place, value in enumerate(tree)}
    if isinstance(tree, dict):
        return {key: value for name, child in tree.items() for key, value in _flat(child, f"{prefix}{name}.").items()}
    return {prefix.removesuffix("."): tree}
