"""Time and memory of the learner's optimizer step on one long sequence, compared with a plain torch loop, on one CPU.

    python bench/context.py [--lengths 2048 8192 32768] [--threads 2]

Both sides are those of bench/learner.py: the plain loop has torch's flash attention (`scaled_dot_product_attention`). They run in separate
processes, in turns. Peak bytes are those of torch's allocator during a step that is not timed, as an accelerator reports them: exact, and the
same in every run. Resident memory also has what the C library keeps for later blocks, which the learner makes it do for speed.

time_N             the learner's seconds over the plain loop's, for N tokens (<= 1.1)
peak_N             the same of peak bytes (<= 0.8)
resident_N         the same of the growth of resident memory up to a step's peak
..._vocabulary     the same for 2048 tokens at a vocabulary of 152k, where the plain loop has all logits at once
growth_CASE        the learner's peak bytes per token for 8192 tokens over those for 2048 (<= 1.1, so nothing grows with the square of the
                   length): of one rank, with `recompute: full`, on the first of two context ranks, and in layers with a window of 1024
"""

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from learner_side.ranks import run_ranks
from learner_side.steps import Shape, Step, batch_of, learner_step, plain_step, save_model
from learner_side.turns import Figures, serve, turns
from memory_side.peaks import tensor_peaks

from polyreme.config.trainer import ParallelConfig
from polyreme_trainer.megatron.models.build import close_parallel

SHAPE = Shape(vocab=512, hidden=128, ffn=384, layers=2, heads=(2, 1), positions=65536)
SHAPES = {"layers": SHAPE, "vocabulary": replace(SHAPE, vocab=151_936, layers=1), "window": replace(SHAPE, window=1024)}
CASES: dict[str, dict[str, object]] = {
    "layers": {"shape": "layers", "context": 1, "recompute": None},
    "recompute": {"shape": "layers", "context": 1, "recompute": "full"},
    "context": {"shape": "layers", "context": 2, "recompute": None},
    "window": {"shape": "window", "context": 1, "recompute": None},
}
GROWS_TO = 8192
ROUNDS = {2048: 5, 8192: 3}
"""The turns of each length; one of others."""
MOST = {"time": 1.1, "peak": 0.8, "growth": 1.1}


def resident(field: str) -> int:
    """The resident memory of this process in bytes: VmRSS, the current value, or VmHWM, the peak."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(field))
    return int(line.split()[1]) * 1024


def peak(step: Step, vocab: int, tokens: int) -> int:
    """The bytes of torch's allocator at the peak of a step on one sequence."""
    batch = batch_of(vocab, 1, tokens)
    with tempfile.TemporaryDirectory() as folder:
        return tensor_peaks(lambda: step(*batch), Path(folder) / "trace.json", mapped=())["device"]


def measured(step: Step, vocab: int, tokens: int) -> Figures:
    """The seconds of a step on one sequence, and the growth of resident memory up to its peak in bytes."""
    batch = batch_of(vocab, 1, tokens)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, began = resident("VmRSS"), time.perf_counter()
    step(*batch)
    return {"seconds": time.perf_counter() - began, "resident": resident("VmHWM") - before}


def side(order: dict[str, Any]) -> tuple[Step, int]:
    """The step of an order's side after a warm-up, which makes the optimizer's moments, and its vocabulary."""
    path, vocab, threads = Path(order["model"]), SHAPES[order["shape"]].vocab, order["threads"]
    if order["kind"] == "plain":
        step = plain_step(path, threads)
    else:
        step = learner_step(path, threads, ParallelConfig(context=order["context"]), order["recompute"])
    step(*batch_of(vocab, 1, 256))
    return step, vocab


def child(order: dict[str, Any]) -> None:
    """A side that takes turns or, with `tokens`, a rank that measures one step of each of these lengths."""
    step, vocab = side(order)
    if "tokens" not in order:
        serve(lambda tokens, timed: measured(step, vocab, tokens) if timed else {"peak": peak(step, vocab, tokens)})
        return
    print(json.dumps({str(tokens): peak(step, vocab, tokens) for tokens in order["tokens"]}), flush=True)
    close_parallel()  # a rank whose peer has exited meanwhile would be aborted in its own exit


def compare(shape: str, folder: Path, lengths: list[int], threads: int) -> dict[str, float]:
    """Prints both sides' figures. Returns the ratio of each for each length."""
    path, found = folder / shape, dict[str, float]()
    save_model(SHAPES[shape], path)
    order = {"model": str(path), "shape": shape, "threads": threads, "context": 1, "recompute": None}
    orders = [json.dumps({**order, "kind": kind}) for kind in ("plain", "learner")]
    with turns(Path(__file__), "--child", orders[0]) as plain, turns(Path(__file__), "--child", orders[1]) as learner:
        for tokens in lengths:
            sides = plain, learner
            rounds = [[side.take(tokens=tokens, timed=1) for side in sides] for _ in range(ROUNDS.get(tokens, 1))]
            peaks = [side.take(tokens=tokens, timed=0)["peak"] for side in sides]
            for number, kind in enumerate(("plain", "learner")):
                seconds, kept = (statistics.median(each[number][name] for each in rounds) for name in ("seconds", "resident"))
                each = f"{peaks[number] / tokens:>10,.0f} bytes/token, {kept / tokens:>10,.0f} resident"
                print(f"{shape:<12}{tokens:>8}  {kind:<8}{seconds:>9.2f} s {each}", flush=True)
            case = tokens if shape == "layers" else shape
            for figure, name in (("time", "seconds"), ("resident", "resident")):
                found[f"{figure}_{case}"] = statistics.median(ours[name] / theirs[name] for theirs, ours in rounds)
            found[f"peak_{case}"] = peaks[1] / peaks[0]
    return found


def growth(case: str, folder: Path, longest: int) -> float:
    """Prints the peak bytes per token of a sequence and of a fourth of it, on one rank of the learner. Returns their ratio."""
    changes = CASES[case]
    path = folder / str(changes["shape"])
    if not path.exists():
        save_model(SHAPES[path.name], path)
    lengths = [longest // 4, longest]
    order = {"model": str(path), "kind": "learner", "threads": 1, "tokens": lengths, **changes}
    found = run_ranks(Path(__file__), order, int(str(changes["context"])))
    short, long = (found[str(tokens)] / tokens for tokens in lengths)
    print(f"{case:<12}{longest:>8}  learner {long:>38,.0f} bytes/token, {short:,.0f} at {lengths[0]}", flush=True)
    return float(long / short)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = compare("layers", folder, args.lengths, args.threads) | compare("vocabulary", folder, [2048], args.threads)
        for case in CASES:
            found[f"growth_{case}"] = growth(case, folder, GROWS_TO)
    figures = {name: round(value, 3) for name, value in found.items()}
    target = {name: MOST[figure] for name in figures if (figure := name.split("_")[0]) in MOST}
    met = all(figures[name] <= most for name, most in target.items())
    print(json.dumps({"bench": "context", "measured": figures, "target": target, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
