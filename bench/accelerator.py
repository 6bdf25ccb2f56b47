"""What works on this machine's accelerator, and how fast: the learner against transformers, memory, copies, and a whole run on one device.

    python bench/accelerator.py [--device cuda|npu|cpu] [--only PART ...] [--seconds 540] [--logs FOLDER]

It needs no network, no vLLM and no Redis server: torch and transformers of the machine, and the wheels that `make accelerator-wheels`
collects. Each part is a process of its own (`accelerator_side/parts.py` says what each does); one that fails is reported with its error, and
the others go on. On cpu the shapes are tiny. The last line is one JSON object with the figures and errors of each part; the exit code is 1 if one
failed.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from accelerator_side.process import run_part, start_method

PARTS = (
    "doctor",
    "parity",
    "packing",
    "recompute",
    "lora",
    "offload",
    "sleep",
    "head",
    "arena",
    "speed",
    "context",
    "of_7b",
    "loop",
)


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
    parser.add_argument("--seconds", type=float, default=540.0, help="For all parts. Default: 540.")
    parser.add_argument("--logs", type=Path, help="An existing folder, which gets what each part printed.")
    args = parser.parse_args()
    device, ends, measured = args.device or _device(), time.monotonic() + args.seconds, {}
    method = start_method(device)
    for part in args.only:
        if (left := ends - (began := time.monotonic())) < 1:
            measured[part] = figures = {"error": f"not run: the other parts took the {args.seconds:g} s for all"}
        else:
            measured[part] = figures = run_part(part, device, method, left, args.logs)
        print(f"{part:<12}{'failed' if 'error' in figures else 'ok':<8}{time.monotonic() - began:6.1f} s", flush=True)
        for name, value in figures.items():
            print(f"    {name:<44} {value:.4g}" if isinstance(value, float) else f"    {name:<44} {value}", flush=True)
    failed = [part for part, figures in measured.items() if "error" in figures]
    print(json.dumps({"bench": "accelerator", "device": device, "measured": measured, "failed": failed, "met": not failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
