"""The run directory: which run it holds, which process owns it, and what lies where in it.

Invariant: a directory holds one run, named by its `run.json`, which is written once the run has a store. One process at a time owns
the directory (a lock that ends with the process). A run that has a checkpoint is continued only with `--resume`; a fork (see `fork`)
gets a directory of its own.
"""

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

from redis.asyncio import Redis

from polyreme.cli.run_records import write_atomically
from polyreme.config.base import BaseConfig
from polyreme.config.load import load_any
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.errors import ConfigError
from polyreme.experience.run import Run

_MODEL_FILE_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_LARGEST_HEADER = 100_000_000
"""Bytes; safetensors' own limit."""
EMBEDDED = "embedded"
NO_REDIS = ""
"""`redis` of run.json of a stage, which needs none."""

Kind = TypeVar("Kind", bound=BaseConfig)


@dataclass(frozen=True)
class Origin:
    """Where a fork began: the parent run, its directory, the iteration of the checkpoint, and the first group of the fork's log."""

    run_id: str
    run_dir: str
    iteration: int
    group: int


@dataclass(frozen=True)
class RunFile:
    """Contents of `run.json`.

    Attributes:
        redis: URL of the run's store, or "embedded" for the one under the directory's redis/.
        redis_url: address of the store at the newest start, without a password.
        forked_from: of a fork.
        replicas: URL of the OpenAI-compatible /v1 of each replica that is there now, by id.
    """

    run_id: str
    redis: str
    redis_url: str = ""
    forked_from: Origin | None = None
    replicas: Mapping[str, str] = field(default_factory=dict)


def claim(config: BaseConfig, resume: bool) -> RunFile | None:
    """Decides which run a start in the configuration's directory means.

    Args:
        config: of the run to start.
        resume: continue the directory's run from its newest checkpoint and on its log; start it when there is none.

    Returns:
        The run to continue; None: a new one. A run that ended before its first checkpoint leaves the directory to the next one.

    Raises:
        ConfigError: the directory holds a run and `resume` is not set, or the run to resume was trained with other values.
    """
    existing = read_run_file(config.run_dir)
    saved = checkpoints(config.run_dir, config.checkpoint_prefix)
    if existing is None or not (resume or saved):
        return None
    if not resume:
        raise ConfigError(
            f"no run in the run directory {config.run_dir} yet",
            f"run {existing.run_id}",
            "Add --resume to continue it, or name=... to start another one. "
            "--fork starts a run in a new directory from a copy of its newest checkpoint.",
        )
    before = _read_config(config.run_dir, type(config))
    if before.fingerprint() != config.fingerprint():
        if not saved:
            return None
        raise ConfigError(
            f"the configuration that run {existing.run_id} was trained with",
            "other values of " + ", ".join(differences(before, config)),
            "Resume with the same values. With other values, --fork starts a run in a new directory from a copy of its checkpoint.",
        )
    return existing


def checkpoints(run_dir: Path, prefix: str = RunConfig.checkpoint_prefix) -> list[Path]:
    """The directory's complete checkpoints, oldest first; their content is not read."""
    found = (run_dir / "checkpoints").glob(f"{prefix}-*")
    return sorted(path for path in found if path.name.removeprefix(f"{prefix}-").isdigit())


async def open_run(
    redis: Redis, config: RunConfig, existing: RunFile | None, store: str, redis_url: str = "", origin: Origin | None = None
) -> Run:
    """Creates the run's record in Redis, or starts the existing one again, and writes config.yaml and run.json.

    Args:
        redis: the run's store.
        config: resolved.
        existing: the run to continue; None: a new one.
        store: `redis` of run.json: its URL, or EMBEDDED.
        redis_url: `redis_url` of run.json.
        origin: of a fork that begins.

    Raises:
        UnavailableError: the store does not have the existing run.
    """
    files = read_model_files(config.model.path)
    if existing is None:
        run = await Run.create(redis, new_run_id(config), config, files, first_group=origin.group if origin else 0)
        found = RunFile(run.run_id, store, redis_url, origin)
    else:
        run = await Run.resume(redis, existing.run_id, config, files)
        found = replace(existing, redis=store, redis_url=redis_url, replicas={})
    write_atomically(config.run_dir / "config.yaml", config.to_yaml())
    _write_run_file(config.run_dir, found)
    await run.emit({"kind": "start", "start": run.start, "forked_from": asdict(origin) if origin else None})
    return run


def open_stage(config: StageConfig, existing: RunFile | None) -> RunFile:
    """Writes config.yaml and run.json of a stage that starts, or starts again. Returns the latter's content."""
    found = existing or RunFile(new_run_id(config), NO_REDIS)
    write_atomically(config.run_dir / "config.yaml", config.to_yaml())
    _write_run_file(config.run_dir, found)
    return found


def new_run_id(config: BaseConfig) -> str:
    """A run id that no other run has. It prefixes Redis keys and names of shared memory."""
    return f"{config.name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Creates the directory when needed and keeps it for this process until the block or the process ends.

    Raises:
        ConfigError: another process owns it, or it cannot be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ConfigError(f"a run directory {run_dir} that can be written", str(error), "Set output_dir.") from None
    try:
        if not _lock(descriptor, fcntl.LOCK_EX):
            raise ConfigError(
                f"sole use of {run_dir}", "another process that runs it", "Wait for it or stop it, or choose another name=..."
            )
        yield
    finally:
        os.close(descriptor)


@contextmanager
def unused(run_dir: Path) -> Iterator[bool]:
    """Whether no process owns the directory; none can until the block ends. Writes nothing there."""
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
    """The directory's run; None when it holds none. Raises ConfigError when the file is damaged."""
    path = run_dir / "run.json"
    try:
        fields = json.loads(path.read_text())
        origin = fields.pop("forked_from", None)
        return RunFile(**fields, forked_from=Origin(**origin) if origin else None)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"a run's record in {path}", str(error), "Restore the file, or choose another name=...") from None


def write_replicas(run_dir: Path, run_id: str, replicas: Mapping[str, str]) -> None:
    """Puts the replicas that are there now into run.json, when it is this run's."""
    found = read_run_file(run_dir)
    if found is not None and found.run_id == run_id:
        _write_run_file(run_dir, replace(found, replicas=replicas))


def _write_run_file(run_dir: Path, content: RunFile) -> None:
    write_atomically(run_dir / "run.json", json.dumps(asdict(content), indent=1) + "\n")


def read_config(run_dir: Path) -> RunConfig:
    """The resolved configuration that the directory's run was last started with. Raises ConfigError."""
    return _read_config(run_dir, RunConfig)


def read_stage_config(run_dir: Path) -> StageConfig:
    """The same of a stage."""
    return _read_config(run_dir, StageConfig)


def _read_config(run_dir: Path, kind: type[Kind]) -> Kind:
    config = load_any(run_dir / "config.yaml")
    if not isinstance(config, kind):
        raise ConfigError(
            f"a run of the same kind in {run_dir}",
            f"the stage {config.stage}" if isinstance(config, StageConfig) else "a run with rollout",
            "Choose another name=...",
        )
    return config


def differences(before: BaseConfig, after: BaseConfig) -> list[str]:
    """Dotted keys whose values differ, sorted."""
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def next_attempt(run_dir: Path) -> Path:
    """Makes and returns the next free logs/attempt_N."""
    attempt = 1
    while True:
        folder = run_dir / "logs" / f"attempt_{attempt}"
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            attempt += 1


def read_model_files(model_dir: Path) -> dict[str, bytes]:
    """What a replica needs of the model besides its weights: architecture, tokenizer, template.

    Raises:
        ConfigError: the directory is not a Hugging Face model with a fast tokenizer.
    """
    _check_model_dir(model_dir)
    return {
        path.name: path.read_bytes()
        for path in sorted(model_dir.iterdir())
        if path.is_file() and path.suffix in _MODEL_FILE_SUFFIXES and not path.name.endswith(".index.json")
    }


def check_inputs(config: RunConfig) -> None:
    """Looks for the files that the configuration names, and at the model's context.

    Raises:
        ConfigError: for the first file that is missing; or samples could be longer than the model's context.
    """
    _check_weights(config.model.path)
    _check_context(
        config.model.path,
        "rollout.max_model_len",
        config.rollout.max_model_len,
        "Lower rollout.max_model_len, data.max_prompt_tokens and rollout.max_new_tokens, or take a model of longer context.",
    )
    named = {"data.train": config.data.train, "data.eval": config.data.eval}
    named |= {f"trainer.sft.{place}.data": phase.data for place, phase in enumerate(config.trainer.sft)}
    _check_files(named)


def check_stage_inputs(config: StageConfig) -> None:
    """The same of a stage."""
    _check_weights(config.model.path)
    advice = "Lower data.max_tokens, or take a model of longer context."
    _check_context(config.model.path, "data.max_tokens", config.data.max_tokens, advice)
    _check_files({"data.train": config.data.train, "data.eval": config.data.eval})


def _check_weights(model_dir: Path) -> None:
    _check_model_dir(model_dir)
    weights = sorted(model_dir.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"weights (*.safetensors) in model.path = {model_dir}", "none", "Save the model with save_pretrained.")
    for shard in weights:
        _check_whole(shard)


def _check_context(model_dir: Path, key: str, longest: int, advice: str) -> None:
    context = _context(model_dir / "config.json")
    if context is not None and longest > context:
        raise ConfigError(f"{key} within the model's context of {context} tokens (max_position_embeddings)", str(longest), advice)


def _check_files(named: Mapping[str, Path | None]) -> None:
    for key, path in named.items():
        if path is not None and not path.is_file():
            raise ConfigError(f"a file at {key} = {path}", "nothing there", f"Set {key}, or make the file.")


def _check_model_dir(model_dir: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        if not (model_dir / name).is_file():
            raise ConfigError(
                f"a Hugging Face model directory at model.path = {model_dir}",
                f"no {name} in it" if model_dir.is_dir() else "no such directory",
                "Set model.path; the demo's model is made by examples/running_total/prepare.py.",
            )


def _check_whole(path: Path) -> None:
    """A download that was cut, or never begun, is found before anything starts. Reads the header only."""
    with open(path, "rb") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if 8 + length <= min(size, _LARGEST_HEADER) else {}
            end = (
                8
                + length
                + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
            )
        except (ValueError, TypeError, LookupError, AttributeError):
            end = -1
    if end != size:
        found = f"{size:,} bytes, which are not what its header says" if end >= 0 else "no safetensors header"
        raise ConfigError(f"whole weights in {path}", found, "Download or save the file again (with Git LFS: `git lfs pull`).")


def _context(path: Path) -> int | None:
    """`max_position_embeddings` of a model's config.json; None when there is none, or when scaling stretches it."""
    try:
        model = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"JSON in {path}", str(error), "Save the model with save_pretrained.") from None
    if not isinstance(model, dict):
        raise ConfigError(f"a JSON object in {path}", type(model).__name__, "Save the model with save_pretrained.")
    scaled = model.get("rope_scaling") or (model.get("rope_parameters") or {}).get("rope_type", "default") != "default"
    return None if scaled else model.get("max_position_embeddings")


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {key: value for name, child in tree.items() for key, value in _flat(child, f"{prefix}{name}.").items()}
    return {prefix.removesuffix("."): tree}
