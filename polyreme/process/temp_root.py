"""The directory of temporary files, where the names of unix sockets fit.

Invariant: a unix socket's address has at most 107 bytes. The directory is TMPDIR (or Python's default) if it leaves enough of
them, else a shorter one of this user or the system. What is created in it has a random name and mode 0700, as `mkdtemp` gives.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyreme.errors import ConfigError

ADDRESS_BYTES = 107
"""Linux has 108, with the final zero."""
REPLICA_ROOM = len("polyreme-rollout-XXXXXXXX/") + 36
"""For the sockets in a replica's own directory, whose names are UUIDs."""


def temp_root(room: int, environ: Mapping[str, str] = os.environ) -> Path:
    """A writable directory in which a name of `room` bytes is the address of a unix socket.

    Raises:
        ConfigError: there is none.
    """
    candidates = [_default(environ), *_shorter(environ)]
    for candidate in candidates:
        if candidate is not None and _fits(candidate, room) and os.access(candidate, os.W_OK | os.X_OK):
            return candidate
    raise ConfigError(
        f"a writable directory for temporary files with a path of at most {ADDRESS_BYTES - room} bytes",
        f"none of {', '.join(str(each) for each in candidates if each is not None)}",
        "Set TMPDIR to one, such as /tmp, and check that its disk has room.",
    )


def _default(environ: Mapping[str, str]) -> Path | None:
    try:
        return Path(environ.get("TMPDIR") or tempfile.gettempdir()).absolute()
    except OSError:  # neither TMPDIR nor any of Python's defaults is writable
        return None


def _shorter(environ: Mapping[str, str]) -> Sequence[Path]:
    runtime = [Path(environ["XDG_RUNTIME_DIR"])] if environ.get("XDG_RUNTIME_DIR") else []
    return [Path("/tmp"), *runtime, Path(f"/run/user/{os.getuid()}"), Path("/var/tmp"), Path("/dev/shm")]


def _fits(folder: Path, room: int) -> bool:
    return folder.is_absolute() and len(os.fsencode(folder)) + 1 + room <= ADDRESS_BYTES
