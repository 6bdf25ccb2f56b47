"""Checkpoints: everything that the ranks need to continue as if they had never stopped. On the same layout the result is equal
bit for bit, on any other layout up to rounding.

A checkpoint is a directory. `state-R.pt` has what rank R saves of every role that changes: the moments that it updates, and on
data rank 0 the weights of its shard that training changes (with adapters, only these). `rng-R.pt` has its random generators.
`checkpoint.json` has the format, the iteration, the layout, the learner's facts, the xxh3_64 of every file, and its own digest.

`begin`, `rank_contents`, `write` and `complete` are the parts of a save, see `checkpoint_writer`. `write` and `complete` use no
collective, so a thread can run them while training continues, on copied `RankContents`. Ranks report to rank 0 by receipts in the
directory, which all of them share.

Invariant: a checkpoint is complete, as it is built under another name, synced and renamed. However damaged, a checkpoint never
prevents finding, pruning or saving others; the log has the reason. Loading unpickles only tensors and plain containers.
"""

import asyncio
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from polyreme.errors import ConfigError, RunFailedError, UnavailableError
from polyreme.experience.loading import Loaded, LoadReports, unreported
from polyreme.process.lifecycle import UNWRITABLE
from polyreme.rundir.checkpoint_manifest import (
    MANIFEST,
    CheckpointFacts,
    digest_of,
    is_intact,
    number_of,
    numbered,
    read_manifest,
    write_manifest,
)
from polyreme.rundir.run_records import write_atomically
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron import atomic
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.models.build import mesh
from polyreme_trainer.megatron.offload.host_copy import copied_to_host, tensors_in
from polyreme_trainer.megatron.parallel.reshard import RankMesh, Read, reader
from polyreme_trainer.megatron.training.roles import AnyRole

logger = logging.getLogger(__name__)

_RECEIPT_POLL = 0.05


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose manifest is intact.

    Attributes:
        path: the checkpoint's directory.
        iteration: the number in the directory's name; of other prefixes, it counts steps.
        layout: the layout of the ranks that wrote it.
        facts: the facts that were saved with it.
        files: file name -> xxh3_64, hexadecimal.
    """

    path: Path
    iteration: int
    layout: CheckpointFacts
    facts: CheckpointFacts
    files: Mapping[str, str]

    def intact(self) -> bool:
        """Whether every file has the digest that was saved."""
        return is_intact(self.path, self.files)


@dataclass(frozen=True)
class RankContents:
    """One rank's contribution to a checkpoint.

    Attributes:
        contents: file name -> tensors and plain containers.
        models: layout, dtype, roles and adapters, for the manifest.
        rank, ranks: this rank's number, and how many there are.
    """

    contents: Mapping[str, object]
    models: CheckpointFacts
    rank: int
    ranks: int

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors."""
        return sum(tensor.nbytes for tensor in tensors_in(self.contents))

    def copied(self, device: Device) -> "RankContents":
        """The same in new host memory, which training does not change."""
        contents = copied_to_host(self.contents)
        device.synchronize()
        return replace(self, contents=contents)


def rank_contents(roles: Sequence[AnyRole]) -> RankContents:
    """This rank's files (not copies). `roles`: the roles that change during training."""
    number = torch.distributed.get_rank()
    contents = {
        _random_file(number): roles[0].model.device.rng_state(),
        _state_file(number): {role.name: role.rank_state() for role in roles},
    }
    return RankContents(contents, asdict(mesh()) | _models(roles), number, torch.distributed.get_world_size())


def begin(path: Path, ranks: Ranks, nbytes: int) -> Path:
    """Creates the directory in which the ranks build the checkpoint `path`, and removes what interrupted saves left. Collective.

    Raises:
        OSError, RunFailedError: it cannot be created, see `save_error`. On rank 0; on the others, LeaderError.
    """

    def create() -> bytes:
        atomic.discard_unfinished(path.parent, f"{path.name.rpartition('-')[0]}-*")
        try:
            return atomic.stage(path).name.encode()
        except OSError as error:
            raise save_error(error, path, nbytes) from None

    return path.with_name(ranks.broadcast_from_leader(lambda: asyncio.to_thread(create)).decode())


def save_error(error: OSError, path: Path, nbytes: int) -> OSError | RunFailedError:
    """What ends a save of the checkpoint `path`, of about `nbytes`. A full or read-only disk is so after a restart, too."""
    if error.errno not in UNWRITABLE:
        return error
    return RunFailedError(
        f"room for the {nbytes / 2**30:.3g} GiB of {path.name} in {path.parent}",
        f"{shutil.disk_usage(path.parent).free / 2**30:.3g} GiB free: {error}",
        "Free disk space for output_dir, or make it writable, then continue with --resume: earlier checkpoints are intact.",
    )


def check_writable(root: Path, ranks: Ranks) -> None:
    """Checks that a checkpoint's directory can be created. Collective.

    Raises:
        ConfigError: it cannot. On rank 0; on the others, LeaderError.
    """

    async def create_and_remove() -> None:
        try:
            await asyncio.to_thread(lambda: atomic.discard(atomic.stage(root / "writable")))
        except OSError as error:
            raise ConfigError(f"a writable directory {root}", str(error), "Make it writable, or set output_dir.") from None

    ranks.on_leader(create_and_remove)


def write(temporary: Path, own: RankContents) -> None:
    """Writes this rank's files of a checkpoint, and last a receipt with their digests. Raises OSError with the file's name."""
    digests = {}
    for name, content in own.contents.items():
        try:
            with (temporary / name).open("wb") as stream:  # with a path, torch hides the cause, such as a full disk
                torch.save(content, stream)
                stream.flush()
                os.fsync(stream.fileno())  # on a file system of several machines, only the writer can sync a file
        except OSError as error:
            error.filename = str(temporary / name)
            raise
        digests[name] = digest_of(temporary / name)
    write_atomically(_receipt(temporary, own.rank), json.dumps({"files": digests}))


def give_up(temporary: Path, own: RankContents, error: OSError) -> None:
    """Removes this rank's files, which may have filled the disk, and tells rank 0, which raises it, why they will not come."""
    for name in own.contents:
        (temporary / name).unlink(missing_ok=True)
    failure = [error.errno, f"{error.strerror} (rank {own.rank})", error.filename]
    write_atomically(_receipt(temporary, own.rank), json.dumps({"error": failure}))


def complete(temporary: Path, path: Path, own: RankContents, facts: CheckpointFacts, seconds: float) -> None:
    """Publishes the checkpoint `path`, replacing an existing one, once each rank has written its files. On rank 0, after `write`.

    Args:
        temporary: the directory that `begin` has created.
        facts: JSON values for the manifest, such as `algorithm`.
        seconds: how long the other ranks may still write.

    Raises:
        OSError: a rank could not write its files.
        UnavailableError: a rank's files are not there in time.
        FileNotFoundError: another process has removed the directory.
    """
    deadline = time.monotonic() + seconds
    digests: dict[str, str] = {}
    for rank in range(own.ranks):
        receipt = _receipt(temporary, rank)
        while not receipt.exists():
            temporary.stat()
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the files of rank {rank} in {temporary} within {seconds:.0f} s",
                    "no receipt",
                    "See the rank's log, and check that all machines share the run directory.",
                )
            time.sleep(_RECEIPT_POLL)
        found = json.loads(receipt.read_text())
        if "error" in found:
            raise OSError(*found["error"])
        digests |= found["files"]
        receipt.unlink()
    write_manifest(temporary, number_of(path), own.models, facts, dict(sorted(digests.items())))
    atomic.publish(temporary, path)


def load(checkpoint: Checkpoint, roles: Sequence[AnyRole], loads: LoadReports = unreported) -> None:
    """Restores weights, moments and random generators. Called on every rank, with an `intact` checkpoint.

    On another layout, a rank takes the generators of the rank with its number; a rank that had none keeps its present ones.

    Args:
        loads: provides per role what to call with the fraction of its kinds of state (weights, moments) that this rank restored.

    Raises:
        ConfigError: the checkpoint has another dtype, other roles or other adapters.
    """
    saved = dict(checkpoint.layout)
    layout = RankMesh(**{field.name: saved.pop(field.name) for field in fields(RankMesh)})
    if saved != _models(roles):
        raise ConfigError(
            f"the models of checkpoint {checkpoint.path.name}, {saved}",
            f"{_models(roles)}",
            "Set model.dtype, trainer.lora and the algorithm as they were, or start from the checkpoint's Hugging Face export.",
        )
    device, here = roles[0].model.device, roles[0].model.rank
    sources = layout.files(here)
    numbers = sorted({number for source in sources for number in (*source.numbers, *source.expert_numbers)})
    states = {number: _read(checkpoint.path / _state_file(number)) for number in numbers}
    for role in roles:
        saved_role = {number: state[role.name] for number, state in states.items()}
        state, loaded = saved_role[numbers[0]], loads(role.name)
        read = reader(role.model.trained_arch, here, sources, saved_role)
        if loaded is not None:
            read = _reporting(read, sum(bool(values) for kind, values in state.items() if kind != "steps"), loaded)
        role.restore(state["steps"], read)
        if loaded is not None:
            loaded(1.0)
    generators = checkpoint.path / _random_file(torch.distributed.get_rank())
    if generators.name in checkpoint.files:
        device.set_rng_state(_read(generators))


def _reporting(read: Read, kinds: int, loaded: Loaded) -> Read:
    """Wraps the function so that it also calls `loaded` with the restored fraction after each kind of state except the last."""
    done = 0

    def reading(kind: str, names: Iterable[str]) -> dict[str, Tensor]:
        nonlocal done
        result = read(kind, names)
        done += 1
        if done < kinds:
            loaded(done / kinds)
        return result

    return reading


def _read(file: Path) -> Any:
    """Tensors and plain containers of a file. The tensors' bytes are read when they are used."""
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


def find(root: Path, prefix: str = "iteration") -> list[Checkpoint]:
    """All checkpoints whose manifests are intact, oldest first; their other files are not read."""
    return list(filter(None, map(read, numbered(root, prefix))))


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
    for path in numbered(root, prefix):
        if path not in kept | newer:
            if number_of(path) > iteration:
                logger.warning("checkpoint %s is damaged: removed", path)
            atomic.discard(path)


def read(path: Path) -> Checkpoint | None:
    """A directory's checkpoint; None for a damaged manifest, with the reason logged. Raises ConfigError for another format."""
    try:
        fields = read_manifest(path)
    except ConfigError:  # of another format; it is a ValueError, too
        raise
    except (OSError, ValueError) as error:
        logger.warning("checkpoint %s is damaged: %s: %s: %s", path, MANIFEST, type(error).__name__, error)
        return None
    return Checkpoint(path, fields["iteration"], fields["layout"], fields["facts"], fields["files"])


def weights_digest(directory: Path) -> str:
    """The digest of a Hugging Face directory's weight files."""
    files = {file.name: digest_of(file) for file in sorted(directory.glob("*.safetensors"))}
    return xxhash.xxh3_64_hexdigest(json.dumps(files).encode())


def _receipt(temporary: Path, rank: int) -> Path:
    return temporary / f"written-{rank}.json"


def _random_file(rank: int) -> str:
    return f"rng-{rank}.pt"


def _state_file(rank: int) -> str:
    return f"state-{rank}.pt"


def _models(roles: Sequence[AnyRole]) -> dict[str, object]:
    adapters = roles[0].model.adapters
    lora = {} if adapters is None else {"lora": adapters.lora.model_dump(mode="json")}
    return {"dtype": roles[0].model.dtype, "roles": [role.name for role in roles], **lora}
