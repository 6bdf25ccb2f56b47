"""The state of a training service in its directory: service.json, beside the run directories of its models in models/.

Invariant: a reader sees the old or the new file. What is said of a model is in its own run directory, and outlives the service.
"""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from polyreme.errors import ConfigError
from polyreme.rundir.run_directory import no_run, read_run_file, read_settings, unused
from polyreme.rundir.run_records import read_summary, write_atomically

logger = logging.getLogger(__name__)

FILE, MODELS = "service.json", "models"
SERVICE = "service"
"""The stage in the configuration of a served model."""


@dataclass(frozen=True)
class WorkerState:
    """The learner or the sampler.

    Attributes:
        busy: fraction of the last minute in which it computed; None before the first minute has a part.
        queued: open requests by model, of the sampler by sampling session.
    """

    busy: float | None = None
    queued: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ServiceState:
    """A service at the Unix time `updated`."""

    base_model: str
    updated: float
    workers: Mapping[str, WorkerState]

    def write(self, folder: Path) -> None:
        """Writes service.json."""
        write_atomically(folder / FILE, json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "ServiceState | None":
        """None for a directory of no service."""
        with suppress(FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError, AttributeError):
            tree = json.loads((folder / FILE).read_text())
            workers = {name: WorkerState(**worker) for name, worker in tree.pop("workers").items()}
            return cls(workers=workers, **tree)
        return None


@dataclass(frozen=True)
class ModelStatus:
    """A model of a tenant.

    Attributes:
        state: running, idle or unloaded; stopped: the service has ended.
        steps: its optimizer steps; loss: of the newest, for each trained token.
        trained_tokens, sampled_tokens: of all its batches and answers.
        queued: its requests that wait.
        updated: Unix time of the newest record; None before the first.
    """

    tenant: str
    model: str
    state: str
    steps: int
    loss: float | None
    trained_tokens: int
    sampled_tokens: int
    queued: int
    updated: float | None


def is_running(folder: Path) -> bool:
    """Whether a process serves from the directory, or trains in it."""
    with unused(folder) as free:
        return not free


def model_statuses(folder: Path, state: ServiceState) -> list[ModelStatus]:
    """The models of a service's directory, the newest activity first."""
    running = is_running(folder)
    found = []
    for path in (folder / MODELS).glob("*/run.json"):
        try:
            found.append(_status(path.parent, state, running))
        except (ConfigError, OSError) as error:
            logger.warning("cannot read the model in %s: %s", path.parent, error)
    return sorted(found, key=lambda each: -(each.updated or 0.0))


def _status(folder: Path, state: ServiceState, running: bool) -> ModelStatus:
    run, summary, settings = read_run_file(folder), read_summary(folder), read_settings(folder)
    if run is None:  # it was deleted meanwhile
        raise no_run(folder)
    word = "unloaded" if summary.get("state") == "done" else "stopped" if not running else "running"
    return ModelStatus(
        tenant=str(settings.get("tenant", "")),
        model=run.run_id,
        state="idle" if word == "running" and summary.get("state") == "stopped" else word,
        steps=int(summary.get("step") or 0),
        loss=summary.get("loss"),
        trained_tokens=int(summary.get("trained_tokens", 0)),
        sampled_tokens=int(summary.get("sampled_tokens", 0)),
        queued=sum(worker.queued.get(run.run_id, 0) for worker in state.workers.values()) if running else 0,
        updated=summary.get("updated"),
    )
