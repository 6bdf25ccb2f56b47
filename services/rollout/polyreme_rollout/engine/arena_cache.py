"""A cache of the mapped arenas of the trainer's host, by nonce.

Invariant: `at` returns the arena that a path names now. `with_nonce` returns the arena with that nonce, even after a newer
learner replaced the file. At most MAX_ARENAS arenas stay mapped.
"""

from importlib import import_module

from polyreme.weights.arena import Arena, ArenaError, identity

MAX_ARENAS = 2  # the current one, and the one that may hold the previously served version


class ArenaCache:
    """Read-only arenas. Not thread-safe.

    Args:
        device: the kind of device to which tensors are copied. For cuda, arenas are page-locked.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._by_file: dict[tuple[int, int], Arena] = {}

    def at(self, path: str) -> Arena:
        """Returns the arena that `path` names now. Raises ArenaError."""
        file = identity(path)
        if file not in self._by_file:
            self._by_file[file] = arena = Arena.open(path)
            if self._device == "cuda":
                arena.page_lock(import_module("torch"))
            for old in list(self._by_file)[:-MAX_ARENAS]:
                self._by_file.pop(old).close()
        return self._by_file[file]

    def with_nonce(self, path: str, nonce: bytes) -> Arena:
        """Returns the arena with this nonce: a mapped one, otherwise the one at `path`. Raises ArenaError."""
        for arena in self._by_file.values():
            if arena.nonce == nonce:
                return arena
        arena = self.at(path)
        if arena.nonce != nonce:
            raise ArenaError(f"{path} is another arena: its nonce is {arena.nonce.hex()}, not {nonce.hex()}")
        return arena

    def close(self) -> None:
        """Unmaps all arenas."""
        for arena in self._by_file.values():
            arena.close()
        self._by_file.clear()
