"""A part of bench/accelerator.py in a process of its own.

Invariant: the parent imports nothing of torch before it starts parts by `spawn`. On a processor, parts are forks and share the imports.
"""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyreme.process.supervisor import last_error


def start_method(device: str) -> str:
    """How parts start on a device. A driver does not survive a fork, and an import that fails is told by each part."""
    if device != "cpu":
        return "spawn"
    try:
        import accelerator_side.parts  # noqa: F401
    except Exception:  # noqa: BLE001
        return "spawn"
    return "fork"


def run_part(part: str, device: str, method: str, left: float, logs: Path | None = None) -> dict[str, Any]:
    """Runs a part for at most `left` seconds. Returns its figures, or its error. What it printed stays as `PART.log` in `logs`."""
    with tempfile.TemporaryDirectory(prefix=f"accelerator-{part}-") as folder:
        context = multiprocessing.get_context(method)
        process = context.Process(target=_child, args=(part, device, folder, _free_port()))  # type: ignore[attr-defined]
        process.start()
        try:
            process.join(left)
            ended = process.exitcode
        finally:
            with suppress(ProcessLookupError):  # the group has what the part started, such as a whole run
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            if logs is not None:
                shutil.copy(Path(folder) / "log", logs / f"{part}.log")
        if ended is None:
            return {"error": f"no end within {left:.0f} s"}
        if ended:
            return {"error": last_error((Path(folder) / "log").read_text())[:500] or f"exit code {ended}"}
        figures: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text())
        return figures


def _child(part: str, device: str, folder: str, port: str) -> None:
    os.setsid()
    with open(Path(folder) / "log", "wb") as log:
        for stream in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(log.fileno(), stream)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    from accelerator_side import parts

    figures = parts.run(part, device, Path(folder))
    (Path(folder) / "figures.json").write_text(json.dumps(figures))


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
