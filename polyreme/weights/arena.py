"""The arena: a file in shared memory with a few slots. Each slot holds one part of one policy version.

Invariant:
- A slot's generation word is odd during a write and grows with every write. A reader that finds the same even word before and
  after reading has read one version. (The word detects overwriting; digests verify the bytes.)
- All pages are allocated at creation, so a write can neither run out of memory nor wait for it.
- The creator locks the file while it lives. A file without the lock belongs to a dead process; the run's next arena and
  `remove_stale` remove it. Unlike a process id, a lock means the same in every container.
- A private arena, which only its owner's processes read, has no name, so it cannot outlive them.
"""

import errno
import fcntl
import mmap
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from polyreme.errors import ConfigError
from polyreme.weights.page_lock import page_lock

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
    """A file is not the expected arena, or a slot was overwritten."""


class Arena:
    """Shared slots of equal size. `create` makes an arena; `open` maps one, for ranks that write and replicas that read.

    Views of a slot stay valid after `close` and after the file's removal, because the mapping keeps the memory.
    """

    def __init__(self, path: Path, descriptor: int, mapping: mmap.mmap, owner: bool) -> None:
        self.path = path
        self._file = _identity(os.fstat(descriptor))
        self._buffer = memoryview(mapping)
        self._header = np.frombuffer(mapping, _HEADER, count=1)
        self._slots = np.frombuffer(mapping, _SLOT, count=int(self._header["slots"][0]), offset=_HEADER.itemsize)
        self.slots = len(self._slots)
        self.slot_nbytes = int(self._header["slot_nbytes"][0])
        self._unlock: Callable[[], object] | None = None
        self._finish = weakref.finalize(self, _finish, path, descriptor, self._file if owner else None, os.getpid())

    @classmethod
    def create(cls, run_id: str, slot_nbytes: int, slots: int = 3, part: int = 0) -> "Arena":
        """Creates the run's arena for this host's part, and removes arenas of the run's dead processes.

        An arena of the same name is replaced even if its owner lives, because the newer learner has the higher term. Mappings of
        the old file stay valid.

        Raises:
            ConfigError: shared memory is too small.
        """
        remove_stale(run_id)
        path = arena_path(run_id, part)
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
        """Creates an arena without a name, for this process and its children. They open it by `path` while it is open here.

        Raises:
            ConfigError: shared memory is too small.
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
        """Maps another process's arena. `writable` is for the other ranks of the trainer's host.

        Raises:
            ArenaError: the file is missing, unreadable, or not a complete arena.
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
        """16 random bytes that identify this arena across hosts and paths."""
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
        """Marks the slot as being written, before any rank writes. Restarts an unfinished write."""
        generation = self.generation(slot)
        self._slots["generation"][slot] = generation + (1 if generation % 2 == 0 else 2)

    def complete(self, slot: int, version: int, term: int) -> int:
        """Marks the slot as complete, after every rank has written. Returns its generation word."""
        generation = self.generation(slot)
        if generation % 2 == 0:
            raise ValueError(f"expected slot {slot} to be in a write; call begin() first")
        self._slots["version"][slot], self._slots["term"][slot] = version, term
        self._slots["generation"][slot] = generation + 1
        return generation + 1

    def check(self, slot: int, generation: int) -> None:
        """Checks a slot. Readers call it before and after reading.

        Raises:
            ArenaError: the slot's generation word is not (or no longer) `generation`.
        """
        found = self.generation(slot)
        if found != generation or found % 2:
            raise ArenaError(f"expected generation {generation} in slot {slot} of {self.path}; found {found}: it was overwritten")

    def page_lock(self, torch: ModuleType) -> None:
        """Page-locks the mapping until `close`, for CUDA. `torch`: the module, which readers without a device do not import."""
        self._unlock = page_lock(self._buffer, torch)

    def close(self) -> None:
        """Closes the file; its owner also removes it. Idempotent. Also runs at process exit and garbage collection."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        self._finish()

    def unlink(self) -> None:
        """Removes the file's name. Existing mappings stay valid; new ones are impossible."""
        _remove(self.path, self._file)

    def _index(self, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise ArenaError(f"expected a slot below {self.slots} of {self.path}; found {slot}")
        return slot


def arena_path(run_id: str, part: int = 0) -> Path:
    """The file of the run's arena for a part."""
    return SHARED_MEMORY / f"polyreme-{run_id}-weights-{part}"


def shared_memory(folder: Path = SHARED_MEMORY) -> tuple[int, int]:
    """The free and all bytes of shared memory; 0 where a machine has none."""
    try:
        room = shutil.disk_usage(folder)
    except OSError:
        return 0, 0
    return room.free, room.total


def identity(path: str | Path) -> tuple[int, int]:
    """Device and inode of the file at `path`. Raises ArenaError when there is none."""
    try:
        return _identity(os.stat(path, follow_symlinks=_private(Path(path))))
    except OSError as error:
        raise ArenaError(f"cannot open {path}: {error.strerror}") from None


def remove_stale(run_id: str | None = None) -> list[Path]:
    """Removes the arenas of the run (None: of any run) whose owner is dead. Returns their paths. Safe at any time."""
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
            if (run_id or found.st_size) and _remove(path, _identity(found)):  # an empty one is being created
                removed.append(path)
        except BlockingIOError:
            pass  # its owner is alive
        finally:
            os.close(descriptor)
    return removed


def _stride(slot_nbytes: int) -> int:
    return -(-slot_nbytes // _PAGE) * _PAGE


def _lay_out(descriptor: int, slot_nbytes: int, slots: int, populate: int) -> mmap.mmap:
    """Turns an empty file into an arena."""
    if not 0 < slots <= _MOST_SLOTS or slot_nbytes <= 0:
        raise ValueError(f"expected 1 to {_MOST_SLOTS} slots of at least 1 byte; found {slots} of {slot_nbytes} bytes")
    size = _PAGE + slots * _stride(slot_nbytes)
    _allocate(descriptor, size)
    mapping = mmap.mmap(descriptor, size, mmap.MAP_SHARED | populate)
    header = np.frombuffer(mapping, _HEADER, count=1)
    header["layout"], header["nonce"] = LAYOUT, np.void(secrets.token_bytes(16))
    header["owner_pid"], header["slots"], header["slot_nbytes"] = os.getpid(), slots, slot_nbytes
    header["magic"] = MAGIC  # written last, so that a visible header is complete
    return mapping


def _allocate(descriptor: int, size: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        free, total = shared_memory()
        raise ConfigError(
            f"{size / 2**20:.0f} MiB of shared memory for the weights in {SHARED_MEMORY}",
            f"{free / 2**20:.0f} MiB free of {total / 2**20:.0f}",
            "Enlarge it (docker: shm_size; kubernetes: an emptyDir with medium Memory), or remove files from it.",
        ) from None


def _check(path: Path, page: bytes, size: int) -> None:
    """Raises ArenaError when the first page is not that of a complete arena of `size` bytes."""
    if len(page) < _PAGE or page[:8] != MAGIC:
        raise ArenaError(f"expected a complete arena at {path}; found another file")
    header = np.frombuffer(page, _HEADER, count=1)[0]
    if header["layout"] != LAYOUT:
        raise ArenaError(
            f"expected arena layout {LAYOUT} at {path}; found {header['layout']}. Run the same release on both sides."
        )
    if header["slots"] > _MOST_SLOTS or size != _PAGE + int(header["slots"]) * _stride(int(header["slot_nbytes"])):
        raise ArenaError(f"expected the size in the header of {path}; found {size} bytes")


def _private(path: Path) -> bool:
    """Whether the path is that of a private arena. Only its links are followed, because the kernel creates them."""
    return path.parts[:2] == ("/", "proc") and path.parts[3:4] == ("fd",)


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _remove(path: Path, file: tuple[int, int]) -> bool:
    """Unlinks the name if it still refers to this file rather than to its replacement."""
    try:
        if _identity(os.stat(path, follow_symlinks=False)) == file:
            path.unlink()
            return True
    except FileNotFoundError:
        pass
    return False


def _finish(path: Path, descriptor: int, owned: tuple[int, int] | None, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child of the process that opened the arena
    if owned:
        _remove(path, owned)
    os.close(descriptor)
