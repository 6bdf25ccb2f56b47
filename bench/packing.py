"""What the plan of micro-batches saves on answers of very different lengths: training in planned micro-batches against plain padding.

    python bench/packing.py [--rounds 7] [--threads 2] [--sequences 96]

`packed_vs_padded` (>= 1.3): tokens per second of forward and backward passes over one batch whose lengths have a long tail (lognormal), in
the micro-batches that the learner plans, over those of micro-batches with a fixed number of rows in the order of the log, each padded to
its longest row. Both have the same budget of padded tokens. The two run in turns; the figure is the median over rounds of the ratio
within a round. `padding_fraction` and `padded_padding_fraction` are the positions that are padding on each side.
"""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyreme_trainer.megatron.batch import MicroBatch
    from polyreme_trainer.megatron.policy import Policy

TARGET = {"packed_vs_padded": 1.3}
BUDGET, LONGEST = 4096, 512


def make_policy(folder: Path, threads: int) -> "Policy":
    """A Qwen2 of 3 million parameters on this process, as the learner builds it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from polyreme.config.trainer import ParallelConfig
    from polyreme_trainer.megatron.build import init_parallel
    from polyreme_trainer.megatron.device import Device
    from polyreme_trainer.megatron.families import load_architecture
    from polyreme_trainer.megatron.policy import Policy

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=LONGEST,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "RANK": "0", "WORLD_SIZE": "1"}
    device = Device("cpu", threads=threads)
    init_parallel(ParallelConfig(), device)
    policy = Policy(load_architecture(folder), "float32", device, trainable=True)
    policy.load_hf(folder)
    return policy


def both_plans(policy: "Policy", count: int) -> "dict[str, list[MicroBatch]]":
    """The micro-batches of each side over the same sequences."""
    import numpy as np

    from polyreme_trainer.megatron.batch import Sequences, cost_of, pad
    from polyreme_trainer.megatron.shard import DataShard

    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(60), 0.9, count), 8, LONGEST).astype(np.int64)
    ids = [random.integers(1, policy.arch.vocab, length) for length in lengths]
    sequences = Sequences(ids, np.ones(int((lengths - 1).sum()), dtype=np.float32))
    device, every, rows = policy.device.torch, np.arange(count), max(1, BUDGET // int(lengths.max()))
    return {
        "padded": [pad(sequences, every[first : first + rows], device) for first in range(0, count, rows)],
        "packed": list(DataShard(device, BUDGET).micro_batches(sequences, every, cost_of(policy.arch))),
    }


def seconds(policy: "Policy", batches: "list[MicroBatch]") -> float:
    """The time of a forward and backward pass over all micro-batches."""
    began = time.perf_counter()
    for batch in batches:
        policy.logprobs(batch.ids, batch.targets).mean().backward()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sequences", type=int, default=96)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder), args.threads)
    plans = both_plans(policy, args.sequences)
    for batches in plans.values():
        seconds(policy, batches)
    rounds = [{side: seconds(policy, batches) for side, batches in plans.items()} for _ in range(args.rounds)]
    padding = {side: sum(b.padding for b in batches) / sum(b.ids.numel() for b in batches) for side, batches in plans.items()}
    for side, batches in plans.items():
        spent = statistics.median(each[side] for each in rounds)
        print(f"{side}: {len(batches)} micro-batches, {padding[side]:.0%} padding, {spent:.3f} s")
    measured = {
        "packed_vs_padded": round(statistics.median(each["padded"] / each["packed"] for each in rounds), 3),
        "padding_fraction": round(padding["packed"], 3),
        "padded_padding_fraction": round(padding["padded"], 3),
    }
    met = measured["packed_vs_padded"] >= TARGET["packed_vs_padded"]
    print(json.dumps({"bench": "packing", "measured": measured, "target": TARGET, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
