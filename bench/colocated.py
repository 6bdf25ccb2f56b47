"""The time of an iteration on shared devices, relative to that on separate ones, on the same two cores.

    python bench/colocated.py [--groups 32] [--samples 8] [--tokens 108] [--iterations 12] [--rounds 2] [--work runs/bench-colocated]

Each run is a whole `polyreme up` of the demo from its warm policy, on-policy. A core stands for a device. On separate devices, the learner has
one rank and there is one replica. On shared ones the learner has two data ranks and there are two replicas, and the two sides take turns. Every
process has one compute thread. The runs alternate.

`colocated_vs_separate` (<= 1.0) is the ratio of the median times from one iteration's record to the next, after the first few.
`handover_seconds` is the median time per iteration in which neither side has the devices, measured by the learner.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from peer_side.tasks import ROOT, Task, demo_task

TARGET = {"colocated_vs_separate": 1.0}
WARM_UP = 3  # iterations
DEADLINE = 900
DEVICES = {"separate": 1, "colocated": 2}
"""The devices of each side."""


def iterations(task: Task, placement: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the records of a run's measured iterations, preceded by the record of the iteration before them."""
    devices = DEVICES[placement]
    command = [
        *(sys.executable, "-m", "polyreme", "up", str(task.config), f"model.path={task.model}"),
        *(f"output_dir={folder}", f"name={folder.name}"),
        *(f"placement={placement}", f"iterations={options.iterations}", "trainer.sft=[]", "trainer.parallel.tensor=1"),
        *(f"trainer.parallel.data={devices}", f"rollout.replicas={devices}", f"rollout.max_new_tokens={options.tokens}"),
        *(f"groups_per_iteration={options.groups}", f"group_size={options.samples}", "eval_interval=0", "eval_samples=1"),
    ]
    subprocess.run(command, check=True, timeout=DEADLINE, stdout=subprocess.DEVNULL)
    lines = (folder / folder.name / "metrics.jsonl").read_text().splitlines()
    found = [record for record in map(json.loads, lines) if record["kind"] == "iteration"]
    return found[WARM_UP - 1 :]


def seconds(records: list[dict[str, Any]]) -> list[float]:
    return [after["time"] - before["time"] for before, after in itertools.pairwise(records)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=108)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each placement")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench-colocated", help="keeps the warm policy")
    options = parser.parse_args()
    task = demo_task(options.work.resolve())
    times: dict[str, list[float]] = {placement: [] for placement in DEVICES}
    handovers: list[float] = []
    with tempfile.TemporaryDirectory() as root:
        for place in range(options.rounds):
            for placement in DEVICES:
                (folder := Path(root) / f"{placement}-{place}").mkdir()
                records = iterations(task, placement, folder, options)
                times[placement] += seconds(records)
                if placement == "colocated":
                    handovers += [record["time/device_leave"] + record["time/device_wait"] for record in records[1:]]
                print(f"{placement}: {statistics.median(seconds(records)):.3f} s an iteration", flush=True)
    medians = {placement: statistics.median(values) for placement, values in times.items()}
    ratio = medians["colocated"] / medians["separate"]
    measured = {
        "colocated_vs_separate": round(ratio, 3),
        "separate_seconds": round(medians["separate"], 3),
        "colocated_seconds": round(medians["colocated"], 3),
        "handover_seconds": round(statistics.median(handovers), 3),
    }
    met = ratio <= TARGET["colocated_vs_separate"]
    print(json.dumps({"bench": "colocated", "measured": measured, "target": TARGET, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
