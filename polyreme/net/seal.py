"""The seal of a run: the digests of the configuration and of the model files that the opener of the run wrote to Redis.

Invariant: a process with a run's seal uses no other configuration or file of it, even if Redis was changed. The opener puts the
seal into its environment, which its children inherit. A service on another machine has none: it trusts Redis behind its password.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping

from polyreme.errors import GateError

SEAL = "POLYREME_RUN_SEAL"


def seal_of(run_id: str, config: bytes, files: Mapping[str, bytes]) -> str:
    """The seal of a run with this configuration (JSON) and these files, by name: the value of the environment variable SEAL."""
    return " ".join((run_id, _digest({"": config}), _digest(files)))


def check_config(run_id: str, config: bytes) -> None:
    """Raises GateError when this process has the run's seal and it is for another configuration."""
    _check(run_id, "configuration", 1, {"": config})


def check_files(run_id: str, files: Mapping[str, bytes]) -> None:
    """Raises GateError when this process has the run's seal and it is for other model files."""
    _check(run_id, "model files", 2, files)


def _check(run_id: str, what: str, place: int, content: Mapping[str, bytes]) -> None:
    words = os.environ.get(SEAL, "").split(" ")
    if len(words) == 3 and words[0] == run_id and not hmac.compare_digest(words[place], _digest(content)):
        raise GateError(
            f"the {what} of run {run_id} in Redis as the process that opened the run wrote them",
            "other content",
            "Something else writes to this Redis: set or change its password, then continue with --resume.",
        )


def _digest(content: Mapping[str, bytes]) -> str:
    """SHA-256 of names and bytes, each with its length."""
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        for part in (name.encode(), data):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
