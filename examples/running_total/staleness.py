"""The cost of staleness: the demo's accuracy by `max_staleness`, with and without importance weights, over several seeds.

Every cell is a separate run from the same warm start. Its result is written to its own file when the run ends, so an interrupted table
continues where it stopped.

    python examples/running_total/staleness.py             # about 21 runs of a minute and a half
    python examples/running_total/staleness.py --most 1    # the next one only
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).resolve().parent
CELL_SECONDS = 600
WARM_SECONDS = 900


CORRECTIONS = {"token": "[{kind: token_tis, cap: 2}]", "none": "[]"}


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    staleness: int
    correction: str
    seed: int

    @property
    def name(self) -> str:
        return f"staleness-{self.staleness}-{self.correction}-seed-{self.seed}"


def cells(staleness: Sequence[int], seeds: Sequence[int]) -> list[Cell]:
    """Returns all cells, seed by seed, so that an interrupted table has complete rows. On-policy cells need no correction."""
    return [
        Cell(bound, correction, seed)
        for seed in seeds
        for bound in staleness
        for correction in (("token", "none") if bound else ("none",))
    ]


def up(log: Path, seconds: float, *overrides: str) -> None:
    """Runs `polyreme up` on the demo's configuration. Raises RuntimeError with the end of its output when it fails."""
    command = [sys.executable, "-m", "polyreme", "up", str(HERE / "run.yaml"), *overrides]
    with open(log, "wb") as output:
        status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=seconds).returncode
    if status:
        raise RuntimeError(f"{log} ended with {status}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:]))


def is_done(run_dir: Path) -> bool:
    """Returns whether the directory's run has trained all its iterations."""
    summary = run_dir / "summary.json"
    return summary.exists() and json.loads(summary.read_text()).get("state") == "done"


def warm_start(folder: Path) -> Path:
    """Returns the Hugging Face directory that all cells start from: version 0 of a run of one iteration. Created once."""
    model = folder / "warm-start" / "hf" / "iteration-000000"
    if not is_done(folder / "warm-start"):
        shutil.rmtree(folder / "warm-start", ignore_errors=True)
        subprocess.run([sys.executable, str(HERE / "prepare.py")], check=True, timeout=120)
        up(folder / "warm-start.log", WARM_SECONDS, f"output_dir={folder}", "name=warm-start", "iterations=1", "eval_interval=0")
    return model


def measure(cell: Cell, folder: Path, model: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Runs a cell from the beginning, after removing the files of an interrupted attempt."""
    shutil.rmtree(folder / cell.name, ignore_errors=True)
    up(
        folder / f"{cell.name}.log",
        CELL_SECONDS,
        f"output_dir={folder}",
        f"name={cell.name}",
        f"model.path={model}",
        "trainer.sft=[]",
        "eval_interval=0",
        f"max_staleness={cell.staleness}",
        f"algorithm.correction={CORRECTIONS[cell.correction]}",
        f"seed={cell.seed}",
        *overrides,
    )
    run = folder / cell.name
    summary = json.loads((run / "summary.json").read_text())
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    iterations = [record for record in records if record["kind"] == "iteration"]
    assert max(record["staleness/max"] for record in iterations) <= cell.staleness
    corrected = [record for record in iterations if "importance/truncated_fraction" in record]
    weights = [record["importance/weight_mean"] for record in corrected]
    truncated = [record["importance/truncated_fraction"] for record in corrected]
    return {
        "before": summary["accuracy_before"],
        "after": summary["accuracy_after"],
        "seconds": summary["rl_seconds"],
        "samples_per_second": summary["samples_per_second"],
        "staleness": summary["staleness"],
        "mixed": mean(record["staleness/mixed_fraction"] for record in iterations),
        "off_policy_kl": mean(record["off_policy_kl"] for record in iterations),
        "weight": mean(weights) if weights else None,
        "truncated": mean(truncated) if truncated else None,
        "learner_wait": sum(record["time/learner_wait"] for record in iterations),
        "rollout_wait": summary["rollout_wait_seconds"],
    }


def table(results: dict[Cell, dict[str, Any]]) -> list[str]:
    """Returns the table as Markdown, with a row for each bound and correction that has results."""
    lines = [
        "| max_staleness | importance weights | accuracy (each seed) | mean staleness | answers over a swap | samples/s | learner waits | replicas wait |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for staleness, correction in dict.fromkeys((cell.staleness, cell.correction) for cell in sorted(results, key=_order)):
        row = [results[cell] for cell in results if (cell.staleness, cell.correction) == (staleness, correction)]
        after = [result["after"] for result in row]
        lag = mean(sum(i * n for i, n in enumerate(result["staleness"])) / sum(result["staleness"]) for result in row)
        lines.append(
            f"| {staleness} | {correction if staleness else 'none needed'} | **{mean(after):.3f}** ({', '.join(f'{a:.3f}' for a in after)}) | "
            f"{lag:.2f} | {mean(r['mixed'] for r in row):.0%} | {mean(r['samples_per_second'] for r in row):.0f} | "
            f"{mean(r['learner_wait'] / r['seconds'] for r in row):.0%} | {mean(r['rollout_wait'] / r['seconds'] for r in row):.0%} |"
        )
    return lines


def _order(cell: Cell) -> tuple[int, bool, int]:
    return cell.staleness, cell.correction == "none", cell.seed


def main() -> None:
    parser = argparse.ArgumentParser(description="The demo's accuracy over max_staleness.")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "runs" / "staleness")
    parser.add_argument("--most", type=int, default=None, help="Maximum number of runs now, including the warm start.")
    parser.add_argument("overrides", nargs="*", help="key=value overrides of the configuration for every run.")
    options = parser.parse_args()
    folder: Path = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    left = options.most if options.most is not None else sys.maxsize
    if left and not is_done(folder / "warm-start"):
        left -= 1
        warm_start(folder)
    results = {}
    for cell in cells(options.staleness, options.seeds):
        path = folder / f"{cell.name}.json"
        if not path.exists() and left > 0:
            left -= 1
            path.write_text(json.dumps(measure(cell, folder, warm_start(folder), options.overrides)) + "\n")
            print(cell.name, path.read_text().strip(), flush=True)
        if path.exists():
            results[cell] = json.loads(path.read_text())
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
