"""Runs supervised training, a reward model from comparisons, and PPO against it: three commands, one after the other.

A step that has begun is started with `--resume`, so this script may be interrupted at any point and continues there when it is started again. Ctrl-C
saves the current step.

    python examples/three_steps/run.py                       # a few minutes on two cores
    python examples/three_steps/run.py --output DIR          # writes to another directory than runs/

Invariant: a step starts when the previous one is done, and reads its export. After a signal no step starts.
"""

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
NAMES = {"sft": "three-steps-sft", "reward-model": "three-steps-reward-model", "up": "three-steps-ppo"}
FILES = {"sft": "sft.yaml", "reward-model": "reward_model.yaml", "up": "ppo.yaml"}


def overrides(command: str, output: Path) -> list[str]:
    """Returns the overrides for another output directory: where each step writes, and where it finds the earlier exports."""
    base, scorer = output / NAMES["sft"] / "hf" / "final", output / NAMES["reward-model"] / "hf" / "final"
    changed = [f"output_dir={output}"]
    if command != "sft":
        changed.append(f"model.path={base}")
    if command == "up":
        changed += [f"reward.rewards.0.model={scorer}", f"trainer.critic.path={scorer}"]
    return changed


def summary(command: str, output: Path) -> dict[str, Any]:
    """Returns the step's summary.json; empty before its first start."""
    path = output / NAMES[command] / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


class Interruption:
    """Handles the signals that end the script: forwards them to the running step, and starts no further step."""

    def __init__(self) -> None:
        self.asked = False
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._take)

    def _take(self, number: int, frame: object) -> None:
        self.asked = True
        if number == signal.SIGINT:
            return  # the terminal sends Ctrl-C to the step itself
        if self._process is None:
            self._waiting.append(number)
        else:
            self._process.send_signal(number)

    def run(self, words: list[str]) -> int:
        """Runs a command to its end, unless a signal has arrived before. Returns its exit status."""
        if self.asked:
            return 0
        self._process = subprocess.Popen(words)
        while self._waiting:  # a signal may have arrived since the check above
            self._process.send_signal(self._waiting.pop())
        status = self._process.wait()
        self._process = None
        return status


def step(command: str, output: Path, extra: list[str], interruption: Interruption) -> int:
    """Runs one step to its end. Returns its exit status."""
    words = [
        sys.executable,
        "-m",
        "polyreme",
        command,
        str(HERE / FILES[command]),
        *overrides(command, output),
        *extra,
        *(["--resume"] if (output / NAMES[command] / "run.json").is_file() else []),
    ]
    print(f"== polyreme {command}", flush=True)
    return interruption.run(words)


def report(output: Path) -> list[str]:
    """Prints the results of the three steps."""
    scored = summary("reward-model", output)["eval_after"]
    lines = (output / NAMES["up"] / "metrics.jsonl").read_text().splitlines()
    parts = [record["parts"] for record in map(json.loads, lines) if record["kind"] == "eval"]
    before, after = parts[0], parts[-1]
    return [
        f"held-out pairs that the reward model orders correctly  {scored['accuracy']:.3f}",
        f"reward model's score of answers to held-out prompts    {before['preference']:.2f} -> {after['preference']:.2f}",
        f"share of vowels in them, which no step was trained on  {before['rule']:.3f} -> {after['rule']:.3f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Supervised training, a reward model, PPO.")
    parser.add_argument("--output", type=Path, default=HERE.parents[1] / "runs", help="Directory of the three run directories.")
    parser.add_argument("overrides", nargs="*", help="key=value overrides for all three steps, such as seed=1.")
    options = parser.parse_args()
    output: Path = options.output.resolve()
    subprocess.run([sys.executable, str(HERE / "prepare.py")], check=True)
    interruption = Interruption()
    for command in FILES:
        status = step(command, output, options.overrides, interruption)
        if status or summary(command, output).get("state") != "done":
            print(f"polyreme {command} is not complete; start this script again to continue", flush=True)
            return status
    print("\n".join(report(output)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
