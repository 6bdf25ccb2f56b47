"""The arena: a file in shared memory with a few slots, each holding one part of one policy version.

Kept here:
- A slot's generation word is odd while the slot is being written, and grows with every write: a reader that finds the same
  even word before and after its reading has read one version. (The words detect; digests decide.)
- All pages exist from the start, so that a write can neither fail for want of memory nor wait for it.
- The creator holds a lock on the file for as long as it lives. A file without that lock belongs to a dead process: it is
  removed by the next arena of the run, and by `remove_stale`. A lock, unlike a process id, means the same in every container.
- An arena that only its owner's own processes read has no name, so that nothing of it can outlive them.
"""

import errno
import fcntl
import mmap
import os
import re
import secrets
import weakref
from pathlib import Path

import numpy as np

from polyreme.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")
MAGIC = b"plyarena"
LAYOUT = 1

_PAGE = 4096
_HEADER = np.dtype(
    [
        *(("magic", "S8"), ("layout", "<u8"), ("nonce", "V16"), ("owner_pid", "<u8"), ("slots", "<u8"), ("slot_nbytes", "<u8")),
        ("reserved", "V8"),
    ]
)
_SLOT = np.dtype([("generation", "<u8"), ("version", "<u8"), ("term", "<u8"), ("reserved", "V40")])
_MOST_SLOTS = _PAGE // _SLOT.itemsize - 1


class ArenaError(Exception):
    """A file is not the arena that was meant, or a slot no longer holds what was asked for."""


class Arena:
    """Shared slots of equal size. Make one with `create` (its owner) or `open` (ranks that write into it, replicas that read).

    Views of a slot stay valid after `close`, also when the file is gone: the memory lives as long as anything maps it.
    """

    def __init__(self, path: Path, descriptor: int, mapping: mmap.mmap, owner: bool) -> None:
        self.path = path
        self._file = _identity(os.fstat(descriptor))
        self._buffer = memoryview(mapping)
        self._header = np.frombuffer(mapping, _HEADER, count=1)
        self._slots = np.frombuffer(mapping, _SLOT, count=int(self._header["slots"][0]), offset=_HEADER.itemsize)
        self.slots = len(self._slots)
        self.slot_nbytes = int(self._header["slot_nbytes"][0])
        self._finish = weakref.finalize(self, _finish, path, descriptor, self._file if owner else None, os.getpid())

    @classmethod
    def create(cls, run_id: str, slot_nbytes: int, slots: int = 3, part: int = 0) -> "Arena":
        """Makes the run's arena for this host's part, and removes what dead processes of the run left behind.

        An arena of the same name is replaced, alive or not: the newer learner has the higher term, and whoever still maps
        the old file keeps its memory.

        Raises:
            ConfigError: shared memory has no room for it.
        """
        remove_stale(run_id)
        path = SHARED_MEMORY / f"polyreme-{run_id}-weights-{part}"
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            mapping = _lay_out(descriptor, slot_nbytes, slots, mmap.MAP_POPULATE)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        return cls(path, descriptor, mapping, owner=True)

    @classmethod
    def private(cls, slot_nbytes: int, slots: int = 1) -> "Arena":
        """Makes an arena without a name, for this process and those it starts: `path` leads them to it while it is open here.

        Raises:
            ConfigError: shared memory has no room for it.
        """
        descriptor = os.open(SHARED_MEMORY, os.O_RDWR | os.O_TMPFILE, 0o600)
        try:
            mapping = _lay_out(descriptor, slot_nbytes, slots, 0)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(Path(f"/proc/{os.getpid()}/fd/{descriptor}"), descriptor, mapping, owner=False)

    @classmethod
    def open(cls, path: str | Path, writable: bool = False) -> "Arena":
        """Maps an arena that another process owns; `writable` is for the other ranks of the trainer's host.

        Raises:
            ArenaError: there is no such file, it may not be read, or it is not a complete arena.
        """
        path = Path(path)
        try:
            descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | (0 if _private(path) else os.O_NOFOLLOW))
        except OSError as error:
            raise ArenaError(f"cannot open {path}: {error.strerror}") from None
        try:
            size = os.fstat(descriptor).st_size
            _check(path, os.pread(descriptor, _PAGE, 0), size)
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE, protection)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, mapping, owner=False)

    @property
    def nonce(self) -> bytes:
        """16 random bytes that tell this arena from every other, on whatever host and path."""
        return bytes(self._header["nonce"][0].tobytes())

    def slot_view(self, slot: int) -> memoryview:
        """The slot's `slot_nbytes` bytes, aligned to a page; read-only unless the arena was opened writable."""
        start = _PAGE + self._index(slot) * _stride(self.slot_nbytes)
        return self._buffer[start : start + self.slot_nbytes]

    def generation(self, slot: int) -> int:
        """Even: complete (0: never written). Odd: being written."""
        return int(self._slots["generation"][self._index(slot)])

    def version(self, slot: int) -> tuple[int, int]:
        """(term, version) of the slot's last complete write."""
        record = self._slots[self._index(slot)]
        return int(record["term"]), int(record["version"])

    def begin(self, slot: int) -> None:
        """Marks the slot as being written, before any rank touches it. A write that was left unfinished is begun anew."""
        generation = self.generation(slot)
        self._slots["generation"][slot] = generation + (1 if generation % 2 == 0 else 2)

    def complete(self, slot: int, version: int, term: int) -> int:
        """Marks the slot as complete, after every rank has written; returns its generation word."""
        generation = self.generation(slot)
        if generation % 2 == 0:
            raise ValueError(f"slot {slot} is not being written")
        self._slots["version"][slot], self._slots["term"][slot] = version, term
        self._slots["generation"][slot] = generation + 1
        return generation + 1

    def check(self, slot: int, generation: int) -> None:
        """For readers, before and after they read.

        Raises:
            ArenaError: the slot's generation word is not (or no longer) `generation`.
        """
        found = self.generation(slot)
        if found != generation or found % 2:
            raise ArenaError(f"slot {slot} of {self.path} is at generation {found}, not {generation}: it was written anew")

    def close(self) -> None:
        """Gives the file up; its owner also removes it. Idempotent; also happens when the process exits or the arena is dropped."""
        self._finish()

    def unlink(self) -> None:
        """Removes the name. Processes that have the arena mapped keep its memory; nobody new can map it."""
        _remove(self.path, self._file)

    def _index(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise ArenaError(f"slot {slot}: the arena {self.path} has {self.slots}")
        return slot


def identity(path: str | Path) -> tuple[int, int]:
    """Device and inode of the file that `path` leads to now. Raises ArenaError: there is none."""
    try:
        return _identity(os.stat(path, follow_symlinks=_private(Path(path))))
    except OSError as error:
        raise ArenaError(f"cannot open {path}: {error.strerror}") from None


def remove_stale(run_id: str | None = None) -> list[Path]:
    """Removes the run's (None: any run's) arenas whose owner is dead; returns their paths. Safe at any time, from any process."""
    ours = re.compile(rf"polyreme-{re.escape(run_id) if run_id else '.+'}-weights-\d+")
    removed = []
    for path in sorted(SHARED_MEMORY.glob("polyreme-*")):
        if not ours.fullmatch(path.name):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except (FileNotFoundError, PermissionError):
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            if (run_id or found.st_size) and _remove(path, _identity(found)):  # an empty one is just being made
                removed.append(path)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(descriptor)
    return removed


def _stride(slot_nbytes: int) -> int:
    return -(-slot_nbytes // _PAGE) * _PAGE


def _lay_out(descriptor: int, slot_nbytes: int, slots: int, populate: int) -> mmap.mmap:
    """Makes an empty file an arena."""
    if not 0 < slots <= _MOST_SLOTS or slot_nbytes <= 0:
        raise ValueError(f"an arena of {slots} slots of {slot_nbytes} bytes")
    size = _PAGE + slots * _stride(slot_nbytes)
    _allocate(descriptor, size)
    mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED | populate)
    header = np.frombuffer(mapping, _HEADER, count=1)
    header["layout"], header["nonce"] = LAYOUT, np.void(secrets.token_bytes(16))
    header["owner_pid"], header["slots"], header["slot_nbytes"] = os.getpid(), slots, slot_nbytes
    header["magic"] = MAGIC  # last: who sees it sees the rest
    return mapping


def _allocate(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        room = os.statvfs(SHARED_MEMORY)
        raise ConfigError(
            f"{size / 2**20:.0f} MiB of shared memory for the weights in {SHARED_MEMORY}",
            f"{room.f_bavail * room.f_frsize / 2**20:.0f} MiB free of {room.f_blocks * room.f_frsize / 2**20:.0f}",
            "Enlarge it (docker: shm_size; kubernetes: an emptyDir with medium Memory), or remove what fills it.",
        ) from None


def _check(path: Path, page: bytes, size: int) -> None:
    """Raises ArenaError when the first page is not that of a complete arena of `size` bytes."""
    if len(page) < _PAGE or page[:8] != MAGIC:
        raise ArenaError(f"{path} is no arena, or not a complete one yet")
    header = np.frombuffer(page, _HEADER, count=1)[0]
    if header["layout"] != LAYOUT:
        raise ArenaError(
            f"{path} has arena layout {header['layout']}, this process knows {LAYOUT}: run the same release on both sides"
        )
    if header["slots"] > _MOST_SLOTS or size != _PAGE + int(header["slots"]) * _stride(int(header["slot_nbytes"])):
        raise ArenaError(f"{path} has {size} bytes, which is not what its header says")


def _private(path: Path) -> bool:
    """Whether the path is that of an arena without a name. Links are followed there alone: only the kernel makes them."""
    return path.parts[:2] == ("/", "proc") and path.parts[3:4] == ("fd",)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _remove(path: Path, file: tuple[int, int]) -> bool:
    """Unlinks the name if it still leads to this file, and not to one that has taken its place."""
    try:
        if _identity(os.stat(path, follow_symlinks=False)) == file:
            path.unlink()
            return True
    except FileNotFoundError:
        pass
    return False


def _finish(path: Path, descriptor: int, owned: tuple[int, int] | None, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child ends, not the process that opened it
    if owned:
        _remove(path, owned)
    os.close(descriptor)
