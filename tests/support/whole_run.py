"""Whole runs through the command line, small enough for two cores: a task that a policy learns in seconds."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import yaml

from polyreme.rundir.run_directory import read_run_file
from polyreme.weights.arena import SHARED_MEMORY
from support.processes import runs
from support.waiting import wait_until

RIGHT = "7"
"""The answer to every prompt of the task."""


def make_task(folder: Path, lead: str = "", engine: str = "vllm") -> Path:
    """Writes model, tokenizer, data and run.yaml. After the warm start, the policy answers with any digit after `lead`; one digit is right.

    Args:
        engine: the inference engine. transformers starts within seconds, for tests that need any real policy.

    Returns the configuration's path.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "running_total"))
    try:
        import prepare  # type: ignore[import-not-found]  # of a folder that is no package
    finally:
        sys.path.pop(0)
    prepare.save_model(folder / "model", seed=0)
    prepare.save_tokenizer(folder / "model")
    rng = random.Random(0)

    def prompt() -> str:
        return "".join(rng.choice("abcdefgh") + rng.choice("0123456789") for _ in range(rng.randint(1, 4)))

    def write(name: str, rows: list[dict[str, str]]) -> None:
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("train.jsonl", [{"prompt": prompt(), "answer": RIGHT} for _ in range(256)])
    write("eval.jsonl", [{"prompt": prompt(), "answer": RIGHT} for _ in range(40)])
    write("sft.jsonl", [{"prompt": prompt(), "response": lead + rng.choice("0123456789")} for _ in range(60 * 32)])
    tree = {
        "output_dir": "runs",
        "iterations": 8,
        "groups_per_iteration": 8,
        "group_size": 8,
        "eval_samples": 40,
        "model": {"path": "model"},
        "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_prompt_tokens": 16},
        "rollout": {
            "engine": engine,
            "max_new_tokens": 4 + len(lead),
            "max_model_len": 32 + len(lead),
            "max_num_seqs": 64,
            "vllm": {"kv_cache_mib": 64},
        },
        "reward": {"rewards": [{"name": "exact"}]},
        "trainer": {
            "parallel": {"tensor": 2},
            "optimizer": {"lr": 1e-3},
            "sft": [{"data": "sft.jsonl", "steps": 60, "batch_size": 32, "lr": 2e-3, "warmup": 5}],
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def make_game(folder: Path) -> Path:
    """Copies the example that guesses numbers into FOLDER/task, with its data and untrained model. Returns its configuration's path."""
    examples = Path(__file__).resolve().parents[2] / "examples"
    shutil.copytree(examples / "guess_number", folder / "task", ignore=shutil.ignore_patterns("data", "__pycache__"))
    shutil.copy(examples / "tiny_chat.py", folder)
    subprocess.run([sys.executable, str(folder / "task" / "prepare.py")], check=True, timeout=600)
    return folder / "task" / "run.yaml"


class Up:
    """A running `polyreme up`, its output in a file."""

    def __init__(self, config: Path, *arguments: str, **environment: str) -> None:
        self.run_dir = config.parent / "runs" / "run"
        for argument in arguments:
            if argument.startswith("name="):
                self.run_dir = config.parent / "runs" / argument.removeprefix("name=")
        self._output = config.parent / f"up-{time.monotonic_ns()}.log"
        env = {name: value for name, value in os.environ.items() if not name.startswith("POLYREME_")} | environment
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "polyreme", "up", str(config), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait(self, seconds: float = 900.0) -> int:
        """Waits for the end and returns the exit status. After a timeout the process is killed, and the test fails with its output."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done within {seconds} s:\n{self.output}") from None

    def until(self, condition: Callable[[], bool], seconds: float = 600.0) -> None:
        """Waits for a condition during the run."""
        deadline = time.monotonic() + seconds
        while not condition():
            status = self.process.poll()
            assert status is None, f"ended with {status}:\n{self.output}"
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"not seen within {seconds} s:\n{self.output}")
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def ends_with_all(self) -> None:
        """Waits until nothing of the killed or signalled run is left; a failure says what is."""
        try:
            wait_until(lambda: not self.leftovers())
        except TimeoutError as error:
            raise AssertionError(f"{error}; left: {self.leftovers()}") from None

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The records of a kind written to metrics.jsonl so far."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [record for line in lines if line.endswith(b"\n") if (record := json.loads(line))["kind"] == kind]

    def leftovers(self) -> list[str]:
        """Processes and shared memory that still belong to the run; none for a run that was refused before its start."""
        found = read_run_file(self.run_dir)
        if found is None:
            return []
        left = [str(path) for path in SHARED_MEMORY.glob(f"*{found.run_id}*")]
        for process in psutil.process_iter(["cmdline", "cwd", "environ"]):
            command, environment = process.info["cmdline"] or [], process.info["environ"] or {}
            ours = (
                found.run_id in command
                or process.info["cwd"] == str(self.run_dir / "redis")  # Redis writes over its command line
                or environment.get("POLYREME_RUN") == found.run_id
            )
            if ours and runs(process):
                left.append(f"{process.pid} {' '.join(command)[:200]}")
        return left
