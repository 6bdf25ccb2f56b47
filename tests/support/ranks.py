"""Runs a function in several gloo ranks, one process each, and kills all of them after a deadline."""

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TOOLS = TESTS.parent / "docs" / "tools"


def run_ranks(function: Callable[..., None], world_size: int, *args: str, timeout: float = 600.0) -> None:
    """Calls the module-level `function(*args)` in `world_size` processes under torchrun's environment contract.

    `args` are strings, and results are passed through files. The ranks form their own process group, which has ended when this returns.

    Raises:
        AssertionError: a rank failed (with the end of its output), or the deadline passed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    call = json.dumps([function.__code__.co_filename, function.__name__, *args])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    common |= {"PYTHONPATH": f"{TESTS}:{TOOLS}", "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(world_size)]
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(logs):
                with log.open("wb") as output:
                    ranks.append(
                        subprocess.Popen(
                            [sys.executable, "-m", "support.ranks", call],
                            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            process_group=ranks[0].pid if ranks else 0,
                        )
                    )
            codes = _wait(ranks, time.monotonic() + timeout)
        finally:
            if ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(ranks[0].pid, signal.SIGKILL)
            for process in ranks:
                process.wait()
        report = [
            f"rank {rank}: {'still running after the deadline or a failure elsewhere' if code is None else f'exit code {code}'}\n"
            + log.read_text(errors="replace")[-4000:]
            for rank, (code, log) in enumerate(zip(codes, logs, strict=True))
            if code != 0
        ]
    assert not report, "\n".join(report)


def _wait(ranks: "list[subprocess.Popen[bytes]]", deadline: float) -> list[int | None]:
    """Waits until all have ended, one has failed, or the deadline has passed. Returns the exit codes."""
    while True:
        codes = [process.poll() for process in ranks]
        if all(code == 0 for code in codes) or any(codes) or time.monotonic() > deadline:
            return codes
        time.sleep(0.02)


def _main() -> None:
    path, name, *args = json.loads(sys.argv[1])
    module = importlib.import_module(".".join(Path(path).relative_to(TESTS).with_suffix("").parts))
    getattr(module, name)(*args)
    import torch.distributed as dist

    if dist.is_initialized():  # gloo's threads abort a process that ends with groups open
        dist.destroy_process_group()


if __name__ == "__main__":
    _main()
