"""PPO with four models compared with TRL's PPOTrainer on this machine: same models, batch, epochs, answers of five tokens.

    python bench/peer_ppo.py [--work runs/bench-peer] [--turns 3] [--steps 30]

Actor, critic and reference start from the same policy. The reward model is a sequence classifier of the same size. TRL holds all four in
one process with two threads, in a venv created from requirements/peer-ppo.txt (1.12.0 is its last version with PPO). Polyreme runs completely:
the reward service serves the reward model, and the learner's two ranks share the batch. Both train each batch of 256 samples four times, with
TRL's KL coefficient and at most five new tokens, which TRL always samples. Both clocks exclude start-up. The sides run in turns, since a
machine's speed drifts.

ppo_throughput_vs_trl   samples/s of whole iterations, Polyreme over TRL (>= 3.0)
floor_vs_trl            the same for the floor: the engine alone, then four models in plain torch, on both cores
seconds_over_floor      median seconds of an iteration over those of the floor (<= 1.2)

If the floor itself is below three times TRL's throughput, the second target replaces the first.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from peer import trl_python
from peer_side.tasks import ROOT, Task, short_task, up

TARGET = {"ppo_throughput_vs_trl": 3.0}
OVER_FLOOR = 1.2
GROUPS, GROUP_SIZE = 32, 8
SAMPLES = GROUPS * GROUP_SIZE
EPOCHS = 4
NEW_TOKENS = 5  # TRL always samples this many; a higher limit would cost only TRL
KL_COEF = 0.05
LR = 1e-5
WARM_UP = 5  # iterations that do not count
PARTS = (
    "time/learner_wait",
    "timing/rollout",
    "timing/reward_model",
    "time/train",
    "timing/update",
    "timing/update_critic",
    "time/write",
)
ALGORITHM = {"preset": "ppo", "epochs": EPOCHS, "minibatches": 1, "kl": {"coef": KL_COEF}}


def reward_model(task: Task) -> Path:
    """Creates, once, a sequence classifier with the policy's body and a head of random weights."""
    path = task.model.parent / "reward-model"
    if not (path / "config.json").exists():
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(task.model, dtype=torch.float32, num_labels=1)
        tokenizer = AutoTokenizer.from_pretrained(task.model)
        model.config.pad_token_id = tokenizer.pad_token_id
        tokenizer.save_pretrained(path)
        model.save_pretrained(path)
    return path


def trl(python: Path, task: Task, reward: Path, steps: int) -> list[float]:
    """Runs TRL. Returns the seconds of its steps."""
    settings = {
        "model": task.model,
        "reward-model": reward,
        "train": task.templated(task.train),
        "steps": steps,
        "samples": SAMPLES,
        "epochs": EPOCHS,
        "max-new-tokens": NEW_TOKENS,
        "kl-coef": KL_COEF,
        "lr": LR,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [str(python), str(ROOT / "bench" / "peer_side" / "trl_ppo.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"TRL failed:\n{done.stderr[-3000:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])["step_seconds"]
    return seconds


def overrides(task: Task, reward: Path, steps: int) -> tuple[str, ...]:
    """Returns the overrides of the task's configuration for a run of Polyreme."""
    return (
        f"model.path={task.model}",
        f"iterations={steps}",
        f"groups_per_iteration={GROUPS}",
        f"group_size={GROUP_SIZE}",
        "data.eval=null",
        f"rollout.max_new_tokens={NEW_TOKENS}",
        "rollout.vllm.threads=1",
        f"reward.rewards={json.dumps([{'model': str(reward), 'name': 'preference', 'options': {'template': 'none'}}])}",
        f"algorithm={json.dumps(ALGORITHM)}",
        "trainer.sft=[]",
        "trainer.parallel.tensor=1",
        "trainer.parallel.data=2",
        f"trainer.optimizer.lr={LR}",
    )


def polyreme(work: Path, task: Task, reward: Path, steps: int) -> list[dict[str, Any]]:
    """Runs Polyreme. Returns the records of its iterations."""
    run_dir = up(task.config, work / "runs", f"ppo-{time.time_ns()}", *overrides(task, reward, steps))
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == "iteration"]


def floor(task: Task, reward: Path) -> dict[str, float]:
    """Returns the seconds of the engine alone and of plain torch in one iteration."""
    script, settings = ROOT / "bench" / "peer_side" / "ppo_floor.py", overrides(task, reward, 1)
    command = [sys.executable, str(script), str(task.config), *settings, "--epochs", str(EPOCHS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"the floor failed:\n{done.stderr[-3000:]}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def throughput(turns: Sequence[Sequence[float]]) -> float:
    """Returns samples per second over a side's turns, after the warm-up of each."""
    counted = [seconds for turn in turns for seconds in turn[WARM_UP:]]
    return SAMPLES * len(counted) / sum(counted)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench-peer")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    python, task = trl_python(work, "trl-ppo-venv", "peer-ppo.txt"), short_task(work)
    reward = reward_model(task)
    theirs, ours, parts = [], [], []
    for _ in range(options.turns):
        theirs.append(trl(python, task, reward, options.steps))
        records = polyreme(work, task, reward, options.steps)
        ours.append([record["time/iteration"] for record in records])
        parts += records[WARM_UP:]
    for name, turns in (("TRL", theirs), ("Polyreme", ours)):
        each = ", ".join(f"{throughput([turn]):.1f}" for turn in turns)
        print(
            f"{name:9} {throughput(turns):7.1f} samples/s ({each}), {median(s for turn in turns for s in turn[WARM_UP:]):.3f} s"
        )
    print("median seconds of " + ", ".join(f"{name} {median(record[name] for record in parts):.3f}" for name in PARTS))
    least = floor(task, reward)
    seconds = least["generate"] + least["train"]
    print(f"floor     {SAMPLES / seconds:7.1f} samples/s: engine {least['generate']:.3f} s, plain torch {least['train']:.3f} s")
    measured = {
        "ppo_throughput_vs_trl": round(throughput(ours) / throughput(theirs), 3),
        "floor_vs_trl": round(SAMPLES / seconds / throughput(theirs), 3),
        "seconds_over_floor": round(median(each for turn in ours for each in turn[WARM_UP:]) / seconds, 3),
    }
    reached = measured["ppo_throughput_vs_trl"] >= TARGET["ppo_throughput_vs_trl"]
    impossible = measured["floor_vs_trl"] < TARGET["ppo_throughput_vs_trl"]
    met = reached or (impossible and measured["seconds_over_floor"] <= OVER_FLOOR)
    target = TARGET | {"seconds_over_floor": OVER_FLOOR}
    print(json.dumps({"bench": "peer_ppo", "measured": measured, "target": target, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
