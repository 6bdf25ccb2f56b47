"""Memory and time of the log-probabilities at a large vocabulary, forward and backward, on one CPU.

    python bench/head.py [--tokens 512] [--vocabulary 151936] [--hidden 256] [--rounds 3] [--threads 2]

`peak_vs_whole` (<= 0.35): the growth of resident memory to its peak in the pass, over that of torch's log_softmax on the whole
[tokens, vocabulary] logits. Gradients, which are the same on both sides, do not count. `peak_bytes` and `whole_peak_bytes` are the two
values. `time_vs_whole`: the ratio of seconds within a round, median over rounds. Each pass runs in its own process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TARGET = {"peak_vs_whole": 0.35}


def resident(field: str) -> int:
    """Returns the resident memory of this process in bytes: VmRSS, the current value, or VmHWM, the peak."""
    (line,) = (each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(field))
    return int(line.split()[1]) * 1024


def run_pass(kind: str, tokens: int, vocabulary: int, hidden: int, threads: int) -> dict[str, float]:
    """Runs one forward and backward pass. Returns its seconds, and the bytes of its peak beyond the gradients."""
    import torch

    from polyreme_trainer.megatron.layers.cpu.linear import linear
    from polyreme_trainer.megatron.layers.logprobs import Head, token_logprobs

    torch.set_num_threads(threads)
    states = torch.randn(tokens, hidden, requires_grad=True)
    weight = (0.1 * torch.randn(vocabulary, hidden)).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    linear(torch.ones(1, 16), torch.ones(16, 16), None, None, False)  # loads the kernels
    gradients = 4 * (states.numel() + weight.numel())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, began = resident("VmRSS"), time.perf_counter()
    if kind == "blocks":
        head = Head(lambda x, w: linear(x, w, None, None, False), 0, vocabulary, 1.0)
        (logprobs,) = token_logprobs(states, weight, targets, head)
    else:
        logprobs = torch.log_softmax(linear(states, weight, None, None, False), dim=-1).gather(1, targets[:, None]).squeeze(1)
    logprobs.mean().backward()
    return {"seconds": time.perf_counter() - began, "bytes": resident("VmHWM") - before - gradients}


def measure(kind: str, args: argparse.Namespace) -> Any:
    """Calls `run_pass` in a new process."""
    sizes = [f"--{name}={getattr(args, name)}" for name in ("tokens", "vocabulary", "hidden", "threads")]
    done = subprocess.run([sys.executable, __file__, "--serve", kind, *sizes], stdout=subprocess.PIPE, check=True, timeout=300)
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--serve", choices=["blocks", "whole"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        print(json.dumps(run_pass(args.serve, args.tokens, args.vocabulary, args.hidden, args.threads)))
        return 0
    rounds = [{kind: measure(kind, args) for kind in ("whole", "blocks")} for _ in range(args.rounds)]
    peaks = {kind: statistics.median(each[kind]["bytes"] for each in rounds) for kind in ("whole", "blocks")}
    ratio = statistics.median(each["blocks"]["seconds"] / each["whole"]["seconds"] for each in rounds)
    print(f"peak beyond the gradients: {peaks['blocks'] / 2**20:,.0f} MiB in blocks, {peaks['whole'] / 2**20:,.0f} MiB whole")
    measured = {
        "peak_vs_whole": round(peaks["blocks"] / peaks["whole"], 3),
        "peak_bytes": peaks["blocks"],
        "whole_peak_bytes": peaks["whole"],
        "time_vs_whole": round(ratio, 3),
    }
    met = measured["peak_vs_whole"] <= TARGET["peak_vs_whole"]
    print(json.dumps({"bench": "head", "measured": measured, "target": TARGET, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
