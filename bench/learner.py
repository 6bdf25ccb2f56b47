"""The cost of the trainer's step compared with a plain torch loop on the same model, batch and threads, tensor parallel 1, one CPU.

    python bench/learner.py [--threads 2] [--rounds 7] [--only 1m|20m]

`vs_torch_1m` (>= 0.7), `vs_torch_20m` (>= 0.95): tokens per second of the learner's optimizer step (megatron-core model, gradient buffers,
clipping, AdamW) over those of transformers' model with forward, backward, clipping and torch's AdamW in its default settings. Every token
is
trained on and no sequence is padded, so neither side can skip work. The two sides run in separate processes, in turns; each figure is the
median over rounds of the ratio within a round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TARGET = {"vs_torch_1m": 0.7, "vs_torch_20m": 0.95}
SIZES: dict[str, dict[str, Any]] = {
    "1m": {
        "vocab_size": 45,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 5,
        "heads": (8, 4),
        "batch": (128, 64),
    },
    "20m": {
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1152,
        "num_hidden_layers": 10,
        "heads": (6, 2),
        "batch": (16, 128),
    },
}
STEPS = 3  # steps in a turn


def save_model(size: str, path: Path) -> None:
    """Saves a Qwen2 with random weights. Prints nothing, because standard output carries the turns' times."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    fields = {name: value for name, value in SIZES[size].items() if name not in ("heads", "batch")}
    heads, groups = SIZES[size]["heads"]
    torch.manual_seed(0)
    config = Qwen2Config(
        **fields, num_attention_heads=heads, num_key_value_heads=groups, tie_word_embeddings=True, max_position_embeddings=512
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


def plain_step(size: str, path: str, threads: int) -> Callable[[], object]:
    import torch
    from transformers import Qwen2ForCausalLM

    torch.set_num_threads(threads)
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids, advantages = _batch(size)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(input_ids=ids[:, :-1]).logits
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        (-(torch.exp(logprobs - logprobs.detach()) * advantages).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def learner_step(size: str, path: str, threads: int) -> Callable[[], object]:
    import numpy as np
    import torch

    from polyreme.config.recipes.presets import resolve
    from polyreme.config.trainer import ParallelConfig
    from polyreme_trainer.algorithms.algorithm import Algorithm
    from polyreme_trainer.algorithms.batch import Advantages, TokenBatch
    from polyreme_trainer.algorithms.state import AlgorithmState
    from polyreme_trainer.megatron.batches.batch import MicroBatch, Sequences
    from polyreme_trainer.megatron.device import Device
    from polyreme_trainer.megatron.huggingface.families import load_architecture
    from polyreme_trainer.megatron.models.build import init_parallel
    from polyreme_trainer.megatron.models.policy import Policy
    from polyreme_trainer.megatron.parallel.shard import DataShard
    from polyreme_trainer.megatron.training.iteration import Iteration
    from polyreme_trainer.megatron.training.losses import IterationLosses, over_ranks
    from polyreme_trainer.megatron.training.optimizer import Adam
    from polyreme_trainer.megatron.training.roles import LossTerm, Role

    device = Device("cpu", threads=threads)
    init_parallel(ParallelConfig(), device)
    policy = Policy(load_architecture(Path(path)), "float32", device, trainable=True)
    policy.load_hf(Path(path))
    shard = DataShard(torch.device("cpu"), 8192)

    def forward(batch: MicroBatch) -> torch.Tensor:
        return policy.logprobs(batch.ids, batch.targets, 1.0)

    actor = Role("actor", policy, forward, shard)
    actor.make_optimizer(Adam())
    ids, advantages = _batch(size)
    count, width = ids.shape
    ones = np.ones(count * (width - 1), dtype=np.float32)
    tokens = TokenBatch(
        offsets=np.arange(count + 1) * (width - 1),
        mask=ones,
        behaviour=-ones,
        version=np.zeros(len(ones), dtype=np.int32),
        group=np.arange(count),
        score=np.zeros(count),
        truncated=np.zeros(count, dtype=bool),
        greedy=np.zeros(count, dtype=bool),
    )
    every = np.arange(count)
    per_token = Advantages(np.repeat(advantages[:, 0].numpy(), width - 1), None, ones)
    algorithm = Algorithm(resolve("grpo", {"kl": None, "aggregation": "token-mean"}), longest=width - 1)
    sequences = Sequences(list(ids.numpy()), ones)
    iteration = Iteration(1, sequences, tokens, [every], AlgorithmState(), lr=1e-4)

    def step() -> None:
        loss = IterationLosses(iteration, algorithm, tokens, per_token).policy(every)
        metrics = actor.forward_backward(LossTerm(sequences, every, loss))
        actor.optim_step(iteration.lr)
        over_ranks(shard, metrics)

    return step


def _batch(size: str) -> Any:
    """Returns ids [b, s + 1] and advantages [b, 1]."""
    import torch

    rows, width = SIZES[size]["batch"]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, SIZES[size]["vocab_size"], (rows, width + 1), generator=generator)
    return ids, torch.randn(rows, 1, generator=generator)


def serve(kind: str, size: str, path: str, threads: int) -> None:
    """Runs in the child: takes a turn for every line on standard input, and prints its seconds on standard output."""
    step = {"plain": plain_step, "learner": learner_step}[kind](size, path, threads)
    for _ in range(2):
        step()
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        print(time.perf_counter() - start, flush=True)


class Turns:
    """A child process that runs its steps on request."""

    def __init__(self, kind: str, size: str, path: str, threads: int, port: int) -> None:
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
        command = [sys.executable, __file__, "--serve", kind, "--only", size, "--model", path, "--threads", str(threads)]
        self._kind = kind
        self._child = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def take(self) -> float:
        assert self._child.stdin and self._child.stdout
        self._child.stdin.write("go\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self._kind} child ended")
        return float(line)

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


def compare(size: str, threads: int, rounds: int, folder: Path) -> float:
    import socket

    path = folder / size
    save_model(size, path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sides = {kind: Turns(kind, size, str(path), threads, port) for kind in ("plain", "learner")}
    try:
        for side in sides.values():  # starts and warms up
            side.take()
        seconds = [{kind: side.take() for kind, side in sides.items()} for _ in range(rounds)]
    finally:
        for side in sides.values():
            side.close()
    rows, width = SIZES[size]["batch"]
    rate = {kind: STEPS * rows * width / statistics.median(turn[kind] for turn in seconds) for kind in sides}
    ratio = statistics.median(turn["plain"] / turn["learner"] for turn in seconds)
    print(f"{size:>5} {threads:>8} {rate['plain']:>16,.0f} {rate['learner']:>16,.0f} {ratio:>8.2f}")
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=list(SIZES))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.only, args.model, args.threads)
        return 0
    print(f"{'model':>5} {'threads':>8} {'plain tokens/s':>16} {'learner tokens/s':>16} {'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        sizes = [args.only] if args.only else list(SIZES)
        measured = {f"vs_torch_{size}": round(compare(size, args.threads, args.rounds, Path(folder)), 3) for size in sizes}
    target = {name: TARGET[name] for name in measured}
    met = all(measured[name] >= target[name] for name in target)
    print(json.dumps({"bench": "learner", "measured": measured, "target": target, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
