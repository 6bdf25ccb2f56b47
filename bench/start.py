"""How long a tiny run takes to start and to stop, compared with the bare engine.

    python bench/start.py [--rounds 3]

start_vs_engine              seconds from `polyreme up` to the end of its first iteration, over those from the start of a process that has only
                             the pinned vLLM to its first token (<= 1.0)
transformers_start_vs_engine the same with `rollout.engine: transformers` (<= 0.35)
stop_seconds                 from Ctrl-C in a running iteration to the end of `polyreme up`, which finishes and saves the iteration (<= 3)

The sides take turns. Each figure is the median over the rounds, ratios within a round.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.whole_run import Up, make_task

MOST = {"start_vs_engine": 1.0, "transformers_start_vs_engine": 0.35, "stop_seconds": 3.0}
TINY = ("iterations=1000", "trainer.sft=[]", "trainer.parallel.tensor=1", "data.eval=null")
DEADLINE = 300.0


def first_token(model: Path) -> None:
    """Runs in the child: one token of the bare engine."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), dtype="float32", enforce_eager=True, max_model_len=32, max_num_seqs=64, kv_cache_memory_bytes=64 << 20)
    (answer,) = llm.generate([4, 5, 6], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 1
    print("token", flush=True)


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
            os.killpg(child.pid, signal.SIGKILL)


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
    found: dict[str, list[float]] = {name: [] for name in MOST}
    for number in range(rounds):
        bare = engine_seconds(config.parent / "model")
        vllm, stop = run_seconds(config, f"vllm-{number}", "vllm")
        plain, plain_stop = run_seconds(config, f"transformers-{number}", "transformers")
        print(
            f"round {number + 1}: first token {bare:.1f} s, first iteration {vllm:.1f} s, with transformers {plain:.1f} s; "
            f"stop {stop:.1f} s and {plain_stop:.1f} s",
            flush=True,
        )
        for name, value in zip(MOST, (vllm / bare, plain / bare, max(stop, plain_stop)), strict=True):
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
    met = all(measured[name] <= most for name, most in MOST.items())
    print(json.dumps({"bench": "start", "measured": measured, "target": MOST, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
