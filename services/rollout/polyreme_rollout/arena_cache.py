"""Mapped arenas of the trainer's host, found again by their nonce.

Kept here: a path leads to the arena that is there now, a nonce to the arena it was read from, even when a newer learner has
put another file in its place since; at most KEPT arenas stay mapped.
"""

from polyreme.weights.arena import Arena, ArenaError, identity

KEPT = 2  # the one in use, and the one that the version served before may be in


class ArenaCache:
    """Read-only arenas. Not thread-safe."""

    def __init__(self) -> None:
        self._by_file: dict[tuple[int, int], Arena] = {}

    def at(self, path: str) -> Arena:
        """The arena that `path` leads to now. Raises ArenaError."""
        file = identity(path)
        if file not in self._by_file:
            self._by_file[file] = Arena.open(path)
            for old in list(self._by_file)[:-KEPT]:
                self._by_file.pop(old).close()
        return self._by_file[file]

    def named(self, path: str, nonce: bytes) -> Arena:
        """The arena with this nonce, mapped already or to be found at `path`. Raises ArenaError."""
        for arena in self._by_file.values():
            if arena.nonce == nonce:
                return arena
        arena = self.at(path)
        if arena.nonce != nonce:
            raise ArenaError(f"{path} is another arena: its nonce is {arena.nonce.hex()}, not {nonce.hex()}")
        return arena

    def close(self) -> None:
        """Unmaps all."""
        for arena in self._by_file.values():
            arena.close()
        self._by_file.clear()
