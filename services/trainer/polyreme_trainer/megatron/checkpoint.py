"""Checkpoints: everything that a rank needs to continue bit for bit, on the same layout, as if it had never stopped.

A checkpoint is a directory. `state-T.pt` has the weights and moments of tensor rank T of every role that changes, written by data rank 0.
`rng-R.pt` has the random generators of rank R. `checkpoint.json` has the format, the iteration, the layout, the learner's facts, the
xxh3_64 of every file, and its own digest.

Invariant: a checkpoint directory is complete, because it is built under another name, synced and renamed. A damaged checkpoint, whatever
the damage, never prevents finding, pruning or saving others; the log has the reason. Loading unpickles only tensors and plain containers.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from polyreme.errors import ConfigError
from polyreme_trainer.megatron import atomic
from polyreme_trainer.megatron.mcore import parallel_state
from polyreme_trainer.megatron.roles import Role

logger = logging.getLogger(__name__)

_MANIFEST = "checkpoint.json"
_FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose manifest is intact.

    Attributes:
        path: the checkpoint's directory.
        iteration: the number in the directory's name.
        layout: the layout of the ranks that wrote it.
        facts: the facts that the learner passed to `save`.
        files: file name -> xxh3_64, hexadecimal.
    """

    path: Path
    iteration: int
    layout: Mapping[str, Any]
    facts: Mapping[str, Any]
    files: Mapping[str, str]

    def intact(self) -> bool:
        """Whether every file has the digest that was saved."""
        return all((self.path / name).is_file() and digest_of(self.path / name) == digest for name, digest in self.files.items())


def save(path: Path, roles: Sequence[Role[Any]], facts: Mapping[str, Any]) -> None:
    """Writes the checkpoint `path` and replaces an existing one. Collective; returns on every rank once it is on disk.

    Args:
        path: a path that ends in a number, see `iteration_path`.
        roles: the roles that change during training.
        facts: JSON values for the manifest, such as `algorithm`; rank 0's are stored.
    """
    temporary = atomic.staging(path)
    first = torch.distributed.get_rank() == 0
    if first:
        atomic.discard(temporary)
        temporary.mkdir(parents=True)
    torch.distributed.barrier()
    model = roles[0].model
    rng, state = _names(roles[0])
    torch.save(model.device.rng_state(), temporary / rng)
    atomic.sync(temporary / rng)  # on a file system of several machines, only the writer can sync a file
    if parallel_state.get_data_parallel_rank() == 0:
        torch.save({role.name: role.state_dict() for role in roles}, temporary / state)
        atomic.sync(temporary / state)
    torch.distributed.barrier()
    if first:
        files = {name: digest_of(temporary / name) for name in _all_names(roles[0])}
        write_manifest(temporary, _number(path), _layout(roles), facts, files)
        atomic.publish(temporary, path)
    torch.distributed.barrier()


def load(checkpoint: Checkpoint, roles: Sequence[Role[Any]]) -> None:
    """Restores weights, moments and random generators. Called on every rank, with an `intact` checkpoint.

    Raises:
        ConfigError: the checkpoint has a different layout, dtype or set of roles.
    """
    if checkpoint.layout != _layout(roles):
        raise ConfigError(
            f"the layout of checkpoint {checkpoint.path.name}, {dict(checkpoint.layout)}",
            f"{_layout(roles)}",
            "Set trainer.parallel, model.dtype and the algorithm as they were, or start from the checkpoint's Hugging Face export.",
        )
    rng, state = (checkpoint.path / name for name in _names(roles[0]))
    states = torch.load(state, map_location="cpu", weights_only=True)
    for role in roles:
        role.load_state_dict(states[role.name])
    roles[0].model.device.set_rng_state(torch.load(rng, map_location="cpu", weights_only=True))


def iteration_path(root: Path, iteration: int, prefix: str = "iteration") -> Path:
    """The path of an iteration's checkpoint, or of a checkpoint whose number counts something else, `prefix`."""
    return root / f"{prefix}-{iteration:06d}"


def find(root: Path, prefix: str = "iteration") -> list[Checkpoint]:
    """All checkpoints whose manifests are intact, oldest first; their other files are not read."""
    found = [read(path) for path in sorted(root.glob(f"{prefix}-*"), key=_number)]
    return [checkpoint for checkpoint in found if checkpoint is not None]


def count(root: Path, prefix: str = "iteration") -> int:
    """The number of checkpoints, including damaged ones."""
    return len(list(root.glob(f"{prefix}-*")))


def newest(root: Path, prefix: str = "iteration") -> Checkpoint | None:
    """The newest intact checkpoint. Newer, damaged ones are logged and skipped."""
    for checkpoint in reversed(find(root, prefix)):
        if checkpoint.intact():
            return checkpoint
        logger.warning("checkpoint %s is damaged: a file differs from its digest", checkpoint.path)
    return None


def prune(root: Path, iteration: int, keep: int, prefix: str = "iteration") -> None:
    """Removes all but the newest `keep` checkpoints up to `iteration`, and damaged newer ones, which a resume has skipped."""
    there = find(root, prefix)
    kept = {checkpoint.path for checkpoint in [each for each in there if each.iteration <= iteration][-keep:]}
    newer = {each.path for each in there if each.iteration > iteration and each.intact()}
    for path in root.glob(f"{prefix}-*"):
        if path not in kept | newer:
            if _number(path) > iteration:
                logger.warning("checkpoint %s is damaged: removed", path)
            atomic.discard(path)


def read(path: Path) -> Checkpoint | None:
    """The checkpoint in a directory; None when its manifest is unusable, with the reason in the log."""
    try:
        fields = json.loads((path / _MANIFEST).read_text())
        digest = fields.pop("digest")
        if fields["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}; found {fields['format']!r}")
        if digest != _manifest_digest(fields):
            raise ValueError("other bytes than were saved")
        if fields["iteration"] != _number(path):
            raise ValueError(f"expected the iteration of the directory's name; found {fields['iteration']}")
        return Checkpoint(path, fields["iteration"], fields["layout"], fields["facts"], fields["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("checkpoint %s is damaged: %s: %s: %s", path, _MANIFEST, type(error).__name__, error)
        return None


def write_manifest(
    folder: Path, iteration: int, layout: Mapping[str, Any], facts: Mapping[str, Any], files: Mapping[str, str]
) -> None:
    """Writes the manifest of a checkpoint whose other files are complete. `files`: name -> xxh3_64."""
    fields = {"format": _FORMAT, "iteration": iteration, "layout": dict(layout), "facts": dict(facts), "files": dict(files)}
    (folder / _MANIFEST).write_text(json.dumps({**fields, "digest": _manifest_digest(fields)}, indent=1))


def digest_of(file: Path) -> str:
    """xxh3_64 of a file's bytes, hexadecimal."""
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _manifest_digest(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _number(path: Path) -> int:
    """The number at the end of a checkpoint's name; -1 without one."""
    text = path.name.rpartition("-")[2]
    return int(text) if text.isdecimal() else -1


def _names(role: Role[Any]) -> tuple[str, str]:
    """The names of this rank's files: its generators, and the state that it shares with its data ranks."""
    return f"rng-{torch.distributed.get_rank()}.pt", f"state-{role.model.rank.tp_rank}.pt"


def _all_names(role: Role[Any]) -> list[str]:
    """The names of all ranks' files, sorted."""
    generators = (f"rng-{rank}.pt" for rank in range(torch.distributed.get_world_size()))
    return sorted([*generators, *(f"state-{rank}.pt" for rank in range(role.model.rank.tp))])


def _layout(roles: Sequence[Role[Any]]) -> dict[str, Any]:
    model = roles[0].model
    data = parallel_state.get_data_parallel_world_size()
    names = [role.name for role in roles]
    return {"tensor": model.rank.tp, "pipeline": model.rank.pp, "data": data, "dtype": model.dtype, "roles": names}
