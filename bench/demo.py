"""Runs the demo as a new user does and compares it with its documented results.

    python bench/demo.py [--work runs/bench-demo]

accuracy_before   held-out greedy accuracy after the warm start (0.15 to 0.5)
accuracy_after    the same after GRPO (>= 0.9)
demo_seconds      from the command to its end, which a user waits for (<= 240, on two cores)
sft_seconds       of these, the warm start
rl_seconds        of these, GRPO, evaluations included
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "running_total"
LEAST = {"accuracy_before": 0.15, "accuracy_after": 0.9}
MOST = {"accuracy_before": 0.5, "demo_seconds": 240.0}
DEADLINE = 900


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench-demo")
    work: Path = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    subprocess.run([sys.executable, EXAMPLE / "prepare.py"], check=True, timeout=120)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        command = [sys.executable, "-m", "polyreme", "up", str(EXAMPLE / "run.yaml"), f"output_dir={folder}", "name=demo"]
        subprocess.run(command, check=True, timeout=DEADLINE)
        seconds = time.perf_counter() - began
        summary = json.loads((Path(folder) / "demo" / "summary.json").read_text())
    results = ("accuracy_before", "accuracy_after", "sft_seconds", "rl_seconds", "samples_per_second")
    measured = {name: summary[name] for name in results} | {"demo_seconds": round(seconds, 1)}
    met = all(measured[name] >= least for name, least in LEAST.items())
    met &= all(measured[name] <= most for name, most in MOST.items())
    print(json.dumps({"bench": "demo", "measured": measured, "target": {"least": LEAST, "most": MOST}, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
