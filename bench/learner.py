"""The cost of the trainer's step compared with a plain torch loop on the same model, batch and threads, tensor parallel 1, one CPU.

    python bench/learner.py [--threads 2] [--rounds 7] [--only 1m|20m]

`vs_torch_1m` (>= 0.7), `vs_torch_20m` (>= 0.95): tokens per second of the learner's optimizer step (megatron-core model, gradient buffers,
clipping, AdamW) over those of transformers' model with forward, backward, clipping and torch's AdamW in its default settings
(`learner_side/steps.py`). The two sides run in separate processes, in turns; each figure is the median over rounds of the ratio within a
round.
"""

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from learner_side.steps import Shape, batch_of, learner_step, plain_step, save_model
from learner_side.turns import Figures, serve, turns

TARGET = {"vs_torch_1m": 0.7, "vs_torch_20m": 0.95}
STEPS = 3  # steps in a turn


@dataclass(frozen=True)
class Case:
    shape: Shape
    rows: int
    width: int


CASES = {
    "1m": Case(Shape(vocab=45, hidden=128, ffn=384, layers=5, heads=(8, 4)), rows=128, width=64),
    "20m": Case(Shape(vocab=4096, hidden=384, ffn=1152, layers=10, heads=(6, 2)), rows=16, width=128),
}


def serve_side(kind: str, case: Case, path: Path, threads: int) -> None:
    """Runs in the child, see `turns`: the seconds of a turn's steps."""
    step = {"plain": plain_step, "learner": learner_step}[kind](path, threads)
    batch = batch_of(case.shape.vocab, case.rows, case.width)
    for _ in range(2):
        step(*batch)

    def work() -> Figures:
        began = time.perf_counter()
        for _ in range(STEPS):
            step(*batch)
        return {"seconds": time.perf_counter() - began}

    serve(work)


def compare(size: str, threads: int, rounds: int, folder: Path) -> float:
    """Prints both sides' tokens per second. Returns the ratio."""
    case, path = CASES[size], folder / size
    save_model(case.shape, path)
    arguments = ["--only", size, "--model", str(path), "--threads", str(threads)]
    this = Path(__file__)
    with turns(this, "--serve", "plain", *arguments) as plain, turns(this, "--serve", "learner", *arguments) as learner:
        sides = {"plain": plain, "learner": learner}
        for side in sides.values():  # starts and warms up
            side.take()
        seconds = [{kind: side.take()["seconds"] for kind, side in sides.items()} for _ in range(rounds)]
    rate = {kind: STEPS * case.rows * case.width / statistics.median(turn[kind] for turn in seconds) for kind in sides}
    ratio = statistics.median(turn["plain"] / turn["learner"] for turn in seconds)
    print(f"{size:>5} {threads:>8} {rate['plain']:>16,.0f} {rate['learner']:>16,.0f} {ratio:>8.2f}")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_side(args.serve, CASES[args.only], args.model, args.threads)
        return 0
    print(f"{'model':>5} {'threads':>8} {'plain tokens/s':>16} {'learner tokens/s':>16} {'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        sizes = [args.only] if args.only else list(CASES)
        measured = {f"vs_torch_{size}": round(compare(size, args.threads, args.rounds, Path(folder)), 3) for size in sizes}
    target = {name: TARGET[name] for name in measured}
    met = all(measured[name] >= target[name] for name in target)
    print(json.dumps({"bench": "learner", "measured": measured, "target": target, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
