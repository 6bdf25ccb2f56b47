"""How long a tiny run takes to start and to stop, compared with the bare engine.

    python bench/start.py [--rounds 3]

start_vs_engine              seconds from `polyreme up` to the end of its first iteration, over those from the start of a process that has only
                             the pinned vLLM to its first token (<= 1.0)
transformers_start_vs_engine the same with `rollout.engine: transformers` (<= 0.35)
transformers_floor_vs_engine what the imports of that start's processes take alone on this machine's cores, over the same seconds: the most of
                             their processor time over the cores, and of those that start one after the other (supervisor, trainer, learner)
stop_seconds                 from Ctrl-C in a running iteration to the end of `polyreme up`, which finishes and saves the iteration (<= 3)

The sides take turns. Each figure is the median over the rounds, ratios within a round. Where the floor leaves no room for a start, 1.25 times
the floor replaces the target.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.whole_run import Up, make_task

PLAIN, FLOOR = "transformers_start_vs_engine", "transformers_floor_vs_engine"
MOST = {"start_vs_engine": 1.0, PLAIN: 0.35, "stop_seconds": 3.0}
TINY = ("iterations=1000", "trainer.sft=[]", "trainer.parallel.tensor=1", "data.eval=null")
DEADLINE = 300.0
STOP_SECONDS = 20.0
ROOM = 1.25
QUICK = "from polyreme.process.quick_imports import quick_imports\nwith quick_imports():\n    "
"""As the processes themselves import what is large."""
MODELS = "from transformers import AutoModelForCausalLM; import transformers.models.qwen2.modeling_qwen2"
"""What a process imports that computes with a Hugging Face model: the replica, and the learner for its gates."""
PROCESSES = {
    "up": "import polyreme.cli.main, polyreme.cli.commands.up",
    "train": "import polyreme_trainer.command",
    "learner": f"import polyreme_trainer.learner.__main__; {MODELS}",
    "orchestrator": "import polyreme_trainer.orchestrator.__main__",
    "reward": "import polyreme_reward.server",
    "rollout": f"import polyreme_rollout.replica, polyreme_rollout.serving, polyreme_rollout.engine.transformers_engine; {MODELS}",
}
IN_TURN = ("up", "train", "learner")


def first_token(model: Path) -> None:
    """Runs in the child: one token of the bare engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), dtype="float32", enforce_eager=True, max_model_len=32, max_num_seqs=64, kv_cache_memory_bytes=64 << 20)
    (answer,) = llm.generate([4, 5, 6], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 1
    print("token", flush=True)


def end_group(child: "subprocess.Popen[str]") -> None:
    """Ends a process and its children, which remove their shared memory unless that takes too long."""
    os.killpg(child.pid, signal.SIGTERM)
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)


def engine_seconds(model: Path) -> float:
    """Seconds to the first token of the bare engine."""
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [sys.executable, __file__, "--first-token", str(model)]
    began = time.perf_counter()
    with subprocess.Popen(
        command,
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        try:
            if not any(line == "token\n" for line in child.stdout):
                raise RuntimeError("the bare engine ended without a token")
            return time.perf_counter() - began
        finally:
            end_group(child)


def import_seconds() -> dict[str, float]:
    """The processor time of each process's imports, one process after the other, in seconds."""
    found = {}
    for name, statements in PROCESSES.items():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-W", "ignore", "-c", QUICK + statements]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=DEADLINE)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found[name] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found


def floor_of(imports: dict[str, float]) -> float:
    """The least seconds in which these imports end on this machine's cores."""
    cores = len(os.sched_getaffinity(0))
    return max(sum(imports.values()) / cores, sum(imports[name] for name in IN_TURN))


def run_seconds(config: Path, name: str, engine: str) -> tuple[float, float]:
    """Seconds of `polyreme up` to the end of its first iteration, and from Ctrl-C to its end."""
    began = time.perf_counter()
    up = Up(config, *TINY, f"name={name}", f"rollout.engine={engine}")
    up.until(lambda: bool(up.records("iteration")), DEADLINE)
    started = time.perf_counter()
    up.until(lambda: len(up.records("iteration")) > 1, DEADLINE)
    stops = time.perf_counter()
    up.signal(signal.SIGINT)
    if status := up.wait(DEADLINE):
        raise RuntimeError(f"expected a run that drains; found exit status {status}:\n{up.output}")
    return started - began, time.perf_counter() - stops


def measure(rounds: int, folder: Path) -> dict[str, float]:
    config = make_task(folder)
    found: dict[str, list[float]] = {name: [] for name in (*MOST, FLOOR)}
    for number in range(rounds):
        bare = engine_seconds(config.parent / "model")
        vllm, stop = run_seconds(config, f"vllm-{number}", "vllm")
        plain, plain_stop = run_seconds(config, f"transformers-{number}", "transformers")
        print(
            f"round {number + 1}: first token {bare:.1f} s, first iteration {vllm:.1f} s, with transformers {plain:.1f} s; "
            f"stop {stop:.1f} s and {plain_stop:.1f} s",
            flush=True,
        )
        imports = import_seconds()
        each = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in imports.items())
        print(f"processor time of imports: {each}; floor {floor_of(imports):.1f} s", flush=True)
        values = (vllm / bare, plain / bare, max(stop, plain_stop), floor_of(imports) / bare)
        for name, value in zip(found, values, strict=True):
            found[name].append(value)
    return {name: round(statistics.median(values), 3) for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-token", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_token:
        first_token(args.first_token)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(args.rounds, Path(folder))
    most = MOST | {PLAIN: max(MOST[PLAIN], ROOM * measured[FLOOR])}
    met = all(measured[name] <= limit for name, limit in most.items())
    print(json.dumps({"bench": "start", "measured": measured, "target": MOST, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
