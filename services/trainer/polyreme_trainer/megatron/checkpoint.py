"""Checkpoints: everything a rank needs to go on as if it had never stopped, bit for bit, on the same layout.

`ROOT/iteration-000012/` holds `state-T.pt` (weights and optimizer of tensor rank T, written by data rank 0), `rng-R.pt` of every rank and
`checkpoint.json`: iteration, layout, the learner's own facts (term, log position, schedule) and the xxh3_64 of every file. A directory of that
name is complete: it is made under another name, synced, and renamed. Loading verifies every digest, and unpickles nothing but tensors
and plain containers.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from polyreme.errors import ConfigError
from polyreme_trainer.megatron import atomic
from polyreme_trainer.megatron.mcore import parallel_state
from polyreme_trainer.megatron.optimizer import Optimizer
from polyreme_trainer.megatron.policy import Policy

logger = logging.getLogger(__name__)

_MANIFEST = "checkpoint.json"
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk. `facts` is what the learner gave to `save`."""

    path: Path
    iteration: int
    facts: Mapping[str, Any]


def save(root: Path, iteration: int, policy: Policy, optimizer: Optimizer, facts: Mapping[str, Any], keep: int) -> Checkpoint:
    """Writes a checkpoint, then removes what it takes the place of (see `prune`). Collective; returns on every rank when it is on disk.

    Args:
        facts: JSON values, the same on every rank.
    """
    path = root / f"iteration-{iteration:06d}"
    temporary = atomic.staging(path)
    first = torch.distributed.get_rank() == 0
    if first:
        atomic.discard(temporary)
        temporary.mkdir(parents=True)
    torch.distributed.barrier()
    rng, state = _names(policy)
    torch.save(policy.device.rng_state(), temporary / rng)
    atomic.sync(temporary / rng)  # on a file system of several machines, only the one that wrote a file can
    if parallel_state.get_data_parallel_rank() == 0:
        torch.save({"policy": policy.state_dict(), "optimizer": optimizer.state_dict()}, temporary / state)
        atomic.sync(temporary / state)
    torch.distributed.barrier()
    if first:
        files = {name: _digest(temporary / name) for name in _all_names(policy)}
        manifest = {"format": _FORMAT, "iteration": iteration, "layout": _layout(policy), "facts": dict(facts), "files": files}
        (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        atomic.publish(temporary, path)
        prune(root, iteration, keep)
    torch.distributed.barrier()
    return Checkpoint(path, iteration, facts)


def prune(root: Path, iteration: int, keep: int) -> None:
    """Removes all but the newest `keep` up to the one just saved, and what is damaged above it: a resume has passed that over."""
    there = find(root)
    for old in [each for each in there if each.iteration <= iteration][:-keep]:
        atomic.discard(old.path)
    for passed in [each for each in there if each.iteration > iteration and not intact(each)]:
        logger.warning("checkpoint %s is damaged: removed", passed.path)
        atomic.discard(passed.path)


def find(root: Path) -> list[Checkpoint]:
    """All complete checkpoints, oldest first; their digests are not read."""
    found = [_read(manifest) for manifest in root.glob(f"iteration-*/{_MANIFEST}")]
    return sorted(found, key=lambda checkpoint: checkpoint.iteration)


def of(root: Path, iteration: int) -> Checkpoint:
    """The complete checkpoint of an iteration, by its name: the list of a directory may be old on another machine than the writer's."""
    return _read(root / f"iteration-{iteration:06d}" / _MANIFEST)


def _read(manifest: Path) -> Checkpoint:
    fields = json.loads(manifest.read_text())
    return Checkpoint(manifest.parent, fields["iteration"], fields["facts"])


def intact(checkpoint: Checkpoint) -> bool:
    """Whether every file has the bytes that were saved."""
    files = json.loads((checkpoint.path / _MANIFEST).read_text())["files"]
    return all((checkpoint.path / name).is_file() and _digest(checkpoint.path / name) == digest for name, digest in files.items())


def newest(root: Path) -> Checkpoint | None:
    """The newest checkpoint whose digests hold; those that do not are reported and passed over."""
    for checkpoint in reversed(find(root)):
        if intact(checkpoint):
            return checkpoint
        logger.warning("checkpoint %s is damaged: passed over", checkpoint.path)
    return None


def load(checkpoint: Checkpoint, policy: Policy, optimizer: Optimizer) -> None:
    """Puts weights, moments and random generators back. Called on every rank, with a checkpoint that is `intact`.

    Raises:
        ConfigError: the checkpoint is of another layout or dtype.
    """
    saved = json.loads((checkpoint.path / _MANIFEST).read_text())["layout"]
    if saved != _layout(policy):
        raise ConfigError(
            f"the layout of checkpoint {checkpoint.path.name}, {saved}",
            f"{_layout(policy)}",
            "Set trainer.parallel and model.dtype as they were, or start from its Hugging Face export.",
        )
    rng, state = (checkpoint.path / name for name in _names(policy))
    tensors = torch.load(state, map_location="cpu", weights_only=True)
    policy.load_state_dict(tensors["policy"])
    optimizer.load_state_dict(tensors["optimizer"])
    policy.device.set_rng_state(torch.load(rng, map_location="cpu", weights_only=True))


def _names(policy: Policy) -> tuple[str, str]:
    """Files of this rank: generators, and the state it shares with its data ranks."""
    return f"rng-{torch.distributed.get_rank()}.pt", f"state-{policy.rank.tp_rank}.pt"


def _all_names(policy: Policy) -> list[str]:
    """Files of all ranks, sorted."""
    generators = (f"rng-{rank}.pt" for rank in range(torch.distributed.get_world_size()))
    return sorted([*generators, *(f"state-{rank}.pt" for rank in range(policy.rank.tp))])


def _layout(policy: Policy) -> dict[str, Any]:
    data = parallel_state.get_data_parallel_world_size()
    return {"tensor": policy.rank.tp, "pipeline": policy.rank.pp, "data": data, "dtype": policy.dtype}


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while block := stream.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
