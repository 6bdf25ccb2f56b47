"""Runs a bench's script as the ranks of one learner.

Invariant: every rank has ended when `run_ranks` returns or raises.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

DEADLINE = 300.0


def run_ranks(script: Path, order: dict[str, Any], world: int) -> dict[str, Any]:
    """Runs `script --child ORDER` once for each rank. Returns the JSON object on the last line that rank 0 prints.

    Args:
        script: a Python file that reads RANK and WORLD_SIZE, as torch.distributed does.
        order: the ranks' work, as JSON.
        world: number of ranks.

    Raises:
        RuntimeError: a rank failed.
        TimeoutExpired: a rank did not end within 300 s.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, script, "--child", json.dumps(order)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=DEADLINE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"{script.name}, order {order}: exit codes {[rank.returncode for rank in ranks]}")
    answer: dict[str, Any] = json.loads(outputs[0].splitlines()[-1])
    return answer
