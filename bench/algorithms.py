"""Trains every preset on the demo's task, from the same warm start.

    python bench/algorithms.py                                  # every preset, seed 0: a minute or two each
    python bench/algorithms.py --presets ppo grpo --seeds 0 1 2

ppo_accuracy, grpo_accuracy   held-out greedy accuracy after 40 iterations (>= 0.9)
least_gain                    the smallest gain of accuracy of the other presets after 16 iterations (>= 0.2)

Each preset is measured without its KL term, since the task requires the policy to leave its warm start. SETTINGS has all other changes.
Each result is written to its own file, so an interrupted bench continues where it stopped.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from polyreme.config.recipes.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]
MEASURED = [name for name, recipe in PRESETS.items() if recipe.teacher_coef == 0]
"""Presets that learn from the task's reward."""
EXAMPLE = ROOT / "examples" / "running_total"
ITERATIONS = {"ppo": 40, "grpo": 40}
FEWER_ITERATIONS = 16
"""Iterations of every other preset."""
RUN_SECONDS = 1800
TARGET = {"ppo_accuracy": 0.9, "grpo_accuracy": 0.9, "least_gain": 0.2}
SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "ppo": ({"minibatches": 4, "advantage": {"lam": 1.0}}, ("trainer.critic.optimizer={lr: 5.0e-4}",))
}
"""Settings in addition to the preset: keys of the section `algorithm`, and other overrides."""


def up(folder: Path, name: str, *overrides: str) -> dict[str, Any]:
    """Runs `polyreme up` on the demo's configuration and returns the run's summary.

    Raises:
    RuntimeError: the command failed; shows the end of its output.
    """
    shutil.rmtree(folder / name, ignore_errors=True)
    command = [sys.executable, "-m", "polyreme", "up", str(EXAMPLE / "run.yaml"), f"output_dir={folder}", f"name={name}"]
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        status = subprocess.run([*command, *overrides], stdout=output, stderr=subprocess.STDOUT, timeout=RUN_SECONDS).returncode
    if status:
        raise RuntimeError(f"{log} ended with {status}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:]))
    summary: dict[str, Any] = json.loads((folder / name / "summary.json").read_text())
    return summary


def warm_start(folder: Path) -> Path:
    """Returns the Hugging Face directory that every run starts from: version 0 of a run of one iteration. Created once."""
    if not (folder / "warm-start" / "summary.json").exists():
        up(folder, "warm-start", "iterations=1", "eval_interval=0")
    return folder / "warm-start" / "hf" / "iteration-000000"


def iterations(preset: str) -> int:
    return ITERATIONS.get(preset, FEWER_ITERATIONS)


def measure(folder: Path, model: Path, preset: str, seed: int) -> dict[str, float]:
    """Returns accuracy before and after, and seconds, of one run. An earlier result is read from its file."""
    name = f"{preset.replace('_', '-')}-seed-{seed}"
    result = folder / f"{name}.json"
    if not result.exists():
        own, others = SETTINGS.get(preset, ({}, ()))
        algorithm = json.dumps({"preset": preset, "kl": None, **own})
        settings = (f"iterations={iterations(preset)}", "eval_interval=0", f"seed={seed}", f"algorithm={algorithm}")
        summary = up(folder, name, f"model.path={model}", "trainer.sft=[]", *settings, *others)
        if summary["state"] != "done":
            raise RuntimeError(f"the run {folder / name} ended as {summary['state']}: {summary['reason']}")
        measured = {"before": summary["accuracy_before"], "after": summary["accuracy_after"], "seconds": summary["rl_seconds"]}
        result.write_text(json.dumps(measured) + "\n")
        print(name, json.dumps(measured), flush=True)
    found: dict[str, float] = json.loads(result.read_text())
    return found


def table(results: dict[str, list[dict[str, float]]]) -> list[str]:
    """Returns the results as a Markdown table with a row for each preset."""
    lines = ["| preset | iterations | before | after (each seed) | gain | seconds |", "|---|---|---|---|---|---|"]
    for preset, runs in results.items():
        before, after = mean(run["before"] for run in runs), [run["after"] for run in runs]
        each = f" ({', '.join(f'{one:.3f}' for one in after)})" if len(after) > 1 else ""
        seconds = mean(run["seconds"] for run in runs)
        lines.append(
            f"| `{preset}` | {iterations(preset)} | {before:.3f} | {mean(after):.3f}{each} | {mean(after) - before:+.3f} | {seconds:.0f} |"
        )
    return lines


def outcome(results: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Returns the figures of this bench, as far as they were measured."""
    measured = {f"{name}_accuracy": mean(run["after"] for run in results[name]) for name in ITERATIONS if name in results}
    gains = [mean(run["after"] - run["before"] for run in runs) for name, runs in results.items() if name not in ITERATIONS]
    return measured | ({"least_gain": min(gains)} if gains else {})


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", choices=MEASURED, default=MEASURED)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench-algorithms")
    parser.add_argument("--model", type=Path, default=None, help="Directory of an existing warm start.")
    options = parser.parse_args(words)
    folder: Path = options.work.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, EXAMPLE / "prepare.py"], check=True, timeout=120)
    model = options.model.resolve() if options.model else warm_start(folder)
    results = {preset: [measure(folder, model, preset, seed) for seed in options.seeds] for preset in options.presets}
    print("\n".join(table(results)))
    measured = outcome(results)
    met = all(value >= TARGET[name] for name, value in measured.items())
    print(
        json.dumps({"bench": "algorithms", "measured": measured, "target": {name: TARGET[name] for name in measured}, "met": met})
    )
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
