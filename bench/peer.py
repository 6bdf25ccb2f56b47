"""Polyreme compared with TRL's GRPOTrainer on this machine: same task, warm policy, batch, reward, learning rate and evaluation prompts.

    python bench/peer.py [--work runs/bench-peer]

TRL (Hugging Face generate, two threads) runs in a separate venv, created from requirements/peer.txt. Polyreme runs completely: Redis,
reward, rollout, orchestrator and learner, in its fastest layout on two cores. Both clocks exclude start-up and evaluations. The sides run
in turns, the short task more than once and each time with its parts, since the machine's speed drifts by more than the difference measured
there.

demo_throughput_vs_trl   samples/s on the demo task over the same number of training steps (>= 5.0)
demo_time_to_80_vs_trl   training seconds until 80% of the held-out problems are solved (<= 0.15)
short_throughput_vs_trl  samples/s on answers of five tokens, where separate services have only costs
demo_floor_vs_trl        the demo throughput if an iteration took only the time of its parts (engines, learner, weights)
demo_time_floor_vs_trl   the demo time to 80% of such iterations
short_floor_vs_trl       the throughput of such iterations on the short task
short_throughput_vs_floor  the one over the other (>= 0.9)
service_tax              the median of an iteration's seconds over those of its parts, minus 1 (<= 0.2)
short_service_tax        the same on the short task

The parts run in turn in one process, once for each iteration of ours: with its prompts, as many tokens in each answer, and its rewards, which
decide what is trained. Where the parts themselves miss a target, the service tax replaces it.
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peer_side.tasks import ROOT, Task, demo_task, short_task, up

TARGET = {"demo_throughput_vs_trl": 5.0, "demo_time_to_80_vs_trl": 0.15, "short_throughput_vs_floor": 0.9}
TAX = 0.2
SAMPLES = 32 * 8
WARM_UP = 10  # iterations that do not count in a throughput
# An engine spends more time in Python than in kernels: two engines use two cores better than two threads of one do. Each takes half of a batch.
ENGINES = ("rollout.replicas=2", f"rollout.max_num_seqs={SAMPLES // 2}", "rollout.vllm.threads=1")
ONE_PROCESS = ("trainer.parallel.tensor=1", "trainer.parallel.threads=2", *ENGINES)
FASTEST = ("trainer.parallel.tensor=1", "trainer.parallel.data=2", *ENGINES)
SHORT_TURNS = 5
GATE = 0.8
SIDE = ROOT / "bench" / "peer_side"


def trl_python(work: Path, name: str = "trl-venv", lock: str = "peer.txt") -> Path:
    """Returns the interpreter of TRL's environment `name`. Creates the environment from a lock in requirements/ if it does not exist."""
    home = work / name
    python = home / "bin" / "python"
    if not (home / "made").exists():
        print("making TRL's environment", flush=True)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "--no-deps", "-r", ROOT / "requirements" / lock], check=True, timeout=900
        )
        (home / "made").touch()
    return python


def trl(python: Path, task: Task, steps: int, lr: float, settings: Sequence[object]) -> dict[str, Any]:
    """Runs TRL on the task's rows as they are. Returns its step seconds, mean lengths and rewards, and evaluations."""
    command = [
        python,
        SIDE / "trl_grpo.py",
        "--model",
        task.model,
        "--train",
        task.train,
        "--steps",
        steps,
        "--lr",
        lr,
        *settings,
    ]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"TRL failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def trl_text(python: Path, task: Task, steps: int, lr: float, eval_interval: int) -> dict[str, Any]:
    """Runs TRL on templated prompts."""
    evaluation = ("--eval", task.templated(task.eval), "--eval-interval", eval_interval)
    templated = dataclasses.replace(task, train=task.templated(task.train))
    return trl(python, templated, steps, lr, ("--max-new-tokens", task.max_new_tokens, "--after", task.after, *evaluation))


def polyreme(work: Path, name: str, task: Task, steps: int, lr: float, eval_interval: int) -> dict[str, Any]:
    """Runs Polyreme. Returns its step seconds, without evaluations, its evaluations and the directory of its samples."""
    settings = [
        f"iterations={steps}",
        f"eval_interval={eval_interval}",
        "eval_samples=200",
        f"trainer.optimizer.lr={lr}",
        "trainer.optimizer.warmup=0",
    ]
    evaluation = [f"data.eval={task.eval}"] if eval_interval else ["data.eval=null"]
    run_dir = up(
        task.config,
        work / "runs",
        f"{name}-{time.time_ns()}",
        *(f"model.path={task.model}", f"data.train={task.train}", "trainer.sft=[]"),
        *FASTEST,
        *settings,
        *evaluation,
    )
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    evaluated = {record["version"]: record for record in records if record["kind"] == "eval"}
    seconds, lengths, rewards, turns = [], [], [], []
    for record in records:
        if record["kind"] == "iteration":
            before = evaluated.get(record["iteration"] - 1)
            seconds.append(record["time/iteration"] - (before["seconds"] if before else 0.0))
            lengths.append(record["response_length/mean"])
            rewards.append(record["reward/mean"])
            turns.append(record.get("episode/turns/mean", 1.0))
    evaluations = [{"step": version, "accuracy": record["accuracy"], "train_seconds": sum(seconds[:version])} for version, record in sorted(evaluated.items())]  # fmt: skip
    means = {"mean_lengths": lengths, "mean_rewards": rewards, "mean_turns": turns}
    return {"step_seconds": seconds, **means, "evaluations": evaluations, "samples": run_dir / "samples"}


@dataclasses.dataclass(frozen=True)
class Parts:
    """The median seconds of each part of an iteration in one process, the mean length of its answers in tokens, and the seconds of each
    iteration's parts."""

    seconds: dict[str, float]
    length: float
    steps: list[float]

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def parts(task: Task, iterations: int = 0, tokens: int = 0, requests: int = 1, replay: Path | None = None) -> Parts:
    """Measures the parts with the task's model, which does not change.

    Args:
        tokens: of each answer; 0: it ends itself.
        requests: by which an answer is sampled, one after the other.
        replay: the samples of a run, whose iterations take the place of `iterations` equal ones.
    """
    settings = [
        f"model.path={task.model}",
        f"data.train={task.train}",
        "trainer.sft=[]",
        "trainer.optimizer.lr=1e-12",
        *ONE_PROCESS,
    ]
    command = [
        sys.executable,
        SIDE / "parts.py",
        task.config,
        *settings,
        "--iterations",
        iterations,
        "--after",
        task.after,
        "--tokens",
        tokens,
        "--requests",
        requests,
        *(() if replay is None else ("--replay", replay)),
    ]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"the parts failed:\n{done.stderr[-3000:]}")
    return Parts(**json.loads(done.stdout.splitlines()[-1]))


def throughput(turns: Sequence[dict[str, Any]]) -> float:
    """Returns samples per second over a side's turns, after the warm-up of each."""
    counted = [seconds for turn in turns for seconds in turn["step_seconds"][WARM_UP:]]
    return SAMPLES * len(counted) / sum(counted)


def at_floor(side: dict[str, Any], floor: Parts) -> dict[str, Any]:
    """Returns the side with every step at the seconds of its parts."""
    evaluations = [{**each, "train_seconds": sum(floor.steps[: each["step"]])} for each in side["evaluations"]]
    return {**side, "step_seconds": floor.steps, "evaluations": evaluations}


def tax(turns: Sequence[dict[str, Any]], floors: Sequence[dict[str, Any]]) -> float:
    """Returns the median of a step's seconds over those of its parts, minus 1, after the warm-up of each turn."""
    counted = [
        seconds / least
        for turn, floor in zip(turns, floors, strict=True)
        for seconds, least in list(zip(turn["step_seconds"], floor["step_seconds"], strict=True))[WARM_UP:]
    ]
    return float(statistics.median(counted)) - 1


def reached(measured: dict[str, float]) -> bool:
    """Whether each target is reached or, where the parts themselves miss it, the services cost at most TAX."""

    target, limit = TARGET["demo_throughput_vs_trl"], TARGET["demo_time_to_80_vs_trl"]
    fast = measured["demo_throughput_vs_trl"] >= target
    if measured["demo_floor_vs_trl"] < target:
        fast = measured["service_tax"] <= TAX
    floor = measured["demo_time_floor_vs_trl"]
    in_time = measured["demo_time_to_80_vs_trl"] <= (limit if floor <= limit else (1 + TAX) * floor)
    return fast and in_time and measured["short_throughput_vs_floor"] >= TARGET["short_throughput_vs_floor"]


def time_to_gate(side: dict[str, Any]) -> float:
    return next(float(e["train_seconds"]) for e in side["evaluations"] if e["accuracy"] >= GATE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench-peer")
    work = parser.parse_args().work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    python, demo, short = trl_python(work), demo_task(work), short_task(work)

    demo_trl = trl_text(python, demo, 24, 1e-4, 2)
    demo_ours = polyreme(work, "demo", demo, 24, 1e-4, 2)
    demo_parts = parts(demo, replay=demo_ours["samples"])
    demo_floor = at_floor(demo_ours, demo_parts)
    short_trl, short_ours, short_parts = [], [], []
    for _ in range(SHORT_TURNS):
        short_trl.append(trl_text(python, short, 60, 1e-5, 0))
        short_ours.append(polyreme(work, "short", short, 60, 1e-5, 0))
        short_parts.append(parts(short, replay=short_ours[-1]["samples"]))
    short_floors = [at_floor(*each) for each in zip(short_ours, short_parts, strict=True)]

    measured = {
        "demo_throughput_vs_trl": throughput([demo_ours]) / throughput([demo_trl]),
        "demo_time_to_80_vs_trl": time_to_gate(demo_ours) / time_to_gate(demo_trl),
        "short_throughput_vs_trl": throughput(short_ours) / throughput(short_trl),
        "demo_floor_vs_trl": throughput([demo_floor]) / throughput([demo_trl]),
        "demo_time_floor_vs_trl": time_to_gate(demo_floor) / time_to_gate(demo_trl),
        "short_floor_vs_trl": throughput(short_floors) / throughput(short_trl),
        "short_throughput_vs_floor": throughput(short_ours) / throughput(short_floors),
        "service_tax": tax([demo_ours], [demo_floor]),
        "short_service_tax": tax(short_ours, short_floors),
    }
    for name, turns in (
        ("demo TRL", [demo_trl]),
        ("demo Polyreme", [demo_ours]),
        ("short TRL", short_trl),
        ("short Polyreme", short_ours),
    ):
        length = statistics.mean(length for turn in turns for length in turn["mean_lengths"][WARM_UP:])
        each = ", ".join(f"{throughput([turn]):.1f}" for turn in turns)
        print(f"{name:15} {throughput(turns):7.1f} samples/s ({each})  mean length {length:5.1f}", end="")
        print(f"  80% after {time_to_gate(turns[0]):.1f} s" if turns[0]["evaluations"] else "")
    shorts = [(f"short, turn {turn}", each) for turn, each in enumerate(short_parts, 1)]
    for name, single in (("demo", demo_parts), *shorts):
        each = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in single.seconds.items())
        print(f"{name}: the parts of an iteration with answers of {single.length:.1f} tokens: {single.total:.3f} s ({each})")
    met = reached(measured)
    rounded = {name: round(value, 3) for name, value in measured.items()}
    print(json.dumps({"bench": "peer", "measured": rounded, "target": TARGET | {"service_tax": TAX}, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
