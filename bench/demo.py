"""Runs the demo as a new user does and compares it with its documented results.

    python bench/demo.py [--work runs/bench-demo]

accuracy_before   held-out greedy accuracy after the warm start (0.15 to 0.5)
accuracy_after    the same after GRPO (>= 0.9)
demo_seconds      from the command to its end, which a user waits for (<= 240, on two cores)
sft_seconds       of these, the warm start
rl_seconds        of these, GRPO, evaluations included
demo_pss_mib      peak of the sum of the proportional set sizes of all its processes, sampled each second (<= 3400: a laptop with 4 GiB)
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "running_total"
LEAST = {"accuracy_before": 0.15, "accuracy_after": 0.9}
MOST = {"accuracy_before": 0.5, "demo_seconds": 240.0, "demo_pss_mib": 3400.0}
DEADLINE = 1500


def proportional_mib(process: psutil.Process) -> dict[str, float]:
    """The proportional set sizes in MiB of a process and its descendants, by number and command. Pages that several map count in shares."""
    found = {}
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):  # it has ended
            rollup = Path(f"/proc/{each.pid}/smaps_rollup").read_text()
            kib = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
            words = [word for word in each.cmdline()[1:] if not word.startswith("-c")]
            found[f"{each.pid} {' '.join(words)[:60] or each.name()}"] = kib / 1024
    return found


def watched(command: list[str]) -> dict[str, float]:
    """Runs a command to its end. Returns the set sizes of its processes at the peak of their sum. Raises CalledProcessError, TimeoutExpired."""
    ends, peak = time.monotonic() + DEADLINE, dict[str, float]()
    with subprocess.Popen(command) as process:
        try:
            while process.poll() is None:
                if time.monotonic() > ends:
                    raise subprocess.TimeoutExpired(command, DEADLINE)
                peak = max(peak, proportional_mib(psutil.Process(process.pid)), key=lambda sizes: sum(sizes.values()))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(1.0)
        except BaseException:
            process.terminate()  # `up` ends its processes
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench-demo")
    work: Path = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    subprocess.run([sys.executable, EXAMPLE / "prepare.py"], check=True, timeout=120)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        command = [sys.executable, "-m", "polyreme", "up", str(EXAMPLE / "run.yaml"), f"output_dir={folder}", "name=demo"]
        sizes = watched(command)
        seconds = time.perf_counter() - began
        summary = json.loads((Path(folder) / "demo" / "summary.json").read_text())
    results = ("accuracy_before", "accuracy_after", "sft_seconds", "rl_seconds", "samples_per_second")
    measured = {name: summary[name] for name in results} | {
        "demo_seconds": round(seconds, 1),
        "demo_pss_mib": round(sum(sizes.values())),
    }
    for name, mib in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{mib:8.0f} MiB  {name}")
    met = all(measured[name] >= least for name, least in LEAST.items())
    met &= all(measured[name] <= most for name, most in MOST.items())
    print(json.dumps({"bench": "demo", "measured": measured, "target": {"least": LEAST, "most": MOST}, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
