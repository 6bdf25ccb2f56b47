"""The tasks of the comparison, each with a policy from Polyreme's supervised stage.

demo    the running-total demo: answers of 3 to 108 tokens, long-tailed
tool    the calculator example: a question, a call of the tool or none, an answer
short   copying four digits: answers of 5 tokens. Some supervised answers have a wrong digit, so that rewards differ within a group
"""

import importlib.util
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "running_total"
CALCULATOR = ROOT / "examples" / "calculator"


@dataclass(frozen=True)
class Task:
    """Files and settings for both sides.

    Attributes:
        config: a run configuration without a supervised stage.
        model: Hugging Face directory of the warm policy.
        train, eval: rows with the untemplated `prompt` and `answer`.
        after: marker in front of the answer, or "".
    """

    name: str
    config: Path
    model: Path
    train: Path
    eval: Path
    max_new_tokens: int
    after: str

    def templated(self, source: Path) -> Path:
        """Writes the same rows with templated prompts, for a trainer that reads text."""
        target = self.model.parent / f"templated_{source.name}"
        rows = [json.loads(line) for line in source.read_text().splitlines()]
        target.write_text("".join(json.dumps({**row, "prompt": row["prompt"] + "="}) + "\n" for row in rows))
        return target


def up(config: Path, output_dir: Path, name: str, *overrides: str, seconds: float = 900) -> Path:
    """Runs `polyreme up` to its end. Returns the run directory."""
    command = [sys.executable, "-m", "polyreme", "up", str(config), f"output_dir={output_dir}", f"name={name}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return output_dir / name


def demo_task(work: Path) -> Task:
    """Warms up the demo's policy, once per `work` folder."""
    _demo().prepare(DEMO / "data", seed=0)
    data = DEMO / "data"
    return _warmed(Task("demo", DEMO / "run.yaml", work / "demo" / "model", data / "train.jsonl", data / "eval.jsonl", 108, "#"))


def short_task(work: Path) -> Task:
    """Creates the copying task and warms up a policy on it, once per `work` folder."""
    folder = work / "short"
    folder.mkdir(parents=True, exist_ok=True)
    demo, rng = _demo(), random.Random(0)
    if not (folder / "fresh" / "config.json").exists():
        demo.save_model(folder / "fresh", 0)
        demo.save_tokenizer(folder / "fresh")

    def digits() -> str:
        return "".join(rng.choices("0123456789", k=4))

    def noisy(text: str) -> str:
        return "".join(rng.choice("0123456789") if rng.random() < 0.1 else digit for digit in text)

    for name, count in (("train", 8192), ("eval", 500)):
        rows = [{"prompt": (text := digits()), "answer": text} for _ in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    taught = [{"prompt": (text := digits()), "response": noisy(text)} for _ in range(200 * 96)]
    (folder / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in taught))
    (folder / "run.yaml").write_text(
        json.dumps(
            {
                "iterations": 60,
                "groups_per_iteration": 32,
                "group_size": 8,
                "model": {"path": "fresh"},
                "data": {"train": "train.jsonl", "eval": "eval.jsonl", "max_prompt_tokens": 8},
                "rollout": {"max_new_tokens": 8, "max_model_len": 32},
                "reward": {"rewards": [{"name": "exact"}]},
                # TRL's GRPO: no reference, mean over all tokens of the batch
                "algorithm": {"preset": "grpo", "kl": None, "aggregation": "token-mean", "advantage": {"std_floor": 1e-4}},
                "trainer": {
                    "optimizer": {"lr": 1e-5},
                    "sft": [{"data": "sft.jsonl", "steps": 200, "batch_size": 96, "lr": 2e-3, "warmup": 20, "cooldown": 80}],
                },
            }
        )
    )
    return _warmed(Task("short", folder / "run.yaml", folder / "model", folder / "train.jsonl", folder / "eval.jsonl", 8, ""))


def tool_task(work: Path) -> Task:
    """Warms up the calculator example's policy, once per `work` folder."""
    data = work / "tool" / "data"
    subprocess.run([sys.executable, CALCULATOR / "prepare.py", "--out", data], check=True, timeout=120, stdout=subprocess.DEVNULL)
    warm_up = [f"model.path={data / 'model'}", f"data.train={data / 'tasks.jsonl'}"]
    for number, name in enumerate(("asked", "mixed")):
        warm_up.append(f"trainer.sft.{number}.data={data / f'{name}.jsonl'}")
    task = Task("tool", CALCULATOR / "run.yaml", work / "tool" / "model", data / "tasks.jsonl", data / "tasks.jsonl", 12, "")
    return _warmed(task, *warm_up)


def _warmed(task: Task, *settings: str) -> Task:
    if not (task.model / "config.json").exists():
        task.model.parent.mkdir(parents=True, exist_ok=True)
        print(f"warming up the policy of task {task.name}", flush=True)
        runs = task.model.parent / "runs"
        run_dir = up(
            task.config, runs, f"warm-up-{time.time_ns()}", "iterations=1", "eval_interval=0", "data.eval=null", *settings
        )
        (run_dir / "hf" / "iteration-000000").rename(task.model)
    return task


def _demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("running_total_prepare", DEMO / "prepare.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
