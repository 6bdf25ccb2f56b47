"""What works on this machine's accelerator, and how fast: the learner against transformers, memory, copies, and a whole run on one device.

    python bench/accelerator.py [--device cuda|npu|cpu] [--only PART ...]

It needs no network, no vLLM and no Redis server: torch and transformers of the machine, and the wheels that `make accelerator-wheels`
collects. Each part is a process of its own (`accelerator_side/parts.py` says what each does); one that fails is reported with its error, and
the others go on. On cpu the shapes are tiny. The last line is one JSON object with the figures and errors of each part; the exit code is 1 if one
failed.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from polyreme.process.supervisor import last_error

PARTS = ("doctor", "parity", "packing", "recompute", "lora", "offload", "head", "arena", "speed", "forward_7b", "loop")
SECONDS = 540.0
"""For all parts."""
BENCH = Path(__file__).resolve().parent


def run_part(part: str, device: str, left: float) -> dict[str, Any]:
    """Runs a part in a process of its own. Returns its figures, or its error."""
    if left < 1:
        return {"error": f"not run: the other parts took the {SECONDS:g} s for all"}
    with tempfile.TemporaryDirectory(prefix=f"accelerator-{part}-") as folder:
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port()}
        with open(Path(folder) / "log", "w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "accelerator_side.parts", part, device, folder],
                env={
                    **os.environ,
                    **rank,
                    "PYTHONPATH": os.pathsep.join([str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])]),
                },
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                return {"error": f"no end within {left:.0f} s"}
            finally:
                with suppress(ProcessLookupError):  # the group has what the part started, such as a whole run
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            log.seek(0)
            told = log.read()
        if process.returncode:
            return {"error": last_error(told)[:500] or f"exit code {process.returncode}"}
        figures: dict[str, Any] = json.loads(output.splitlines()[-1])
        return figures


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _device() -> str:
    """The machine's accelerator, or cpu. Asked in a process of its own, since a driver may hang."""
    code = "import importlib.util as u, torch\nif u.find_spec('torch_npu'): import torch_npu\n"
    code += (
        "print('cuda' if torch.cuda.is_available() else 'npu' if hasattr(torch, 'npu') and torch.npu.is_available() else 'cpu')"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout.split()[
        -1
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "npu", "cpu"), help="Default: the machine's accelerator, or cpu.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    args = parser.parse_args()
    device, ends, measured = args.device or _device(), time.monotonic() + SECONDS, {}
    for part in args.only:
        began = time.monotonic()
        measured[part] = figures = run_part(part, device, ends - began)
        print(f"{part:<12}{'failed' if 'error' in figures else 'ok':<8}{time.monotonic() - began:6.1f} s", flush=True)
        for name, value in figures.items():
            print(f"    {name:<44} {value:.4g}" if isinstance(value, float) else f"    {name:<44} {value}", flush=True)
    failed = [part for part, figures in measured.items() if "error" in figures]
    print(json.dumps({"bench": "accelerator", "device": device, "measured": measured, "failed": failed, "met": not failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
