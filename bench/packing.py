"""The gain from packing on answers of very different lengths: packed sequences compared with plain padding.

    python bench/packing.py [--rounds 7] [--threads 2] [--sequences 96]

`packed_vs_padded` (>= 1.3): tokens per second of forward and backward passes over one batch with long-tailed (lognormal) lengths, in the
packed micro-batches that the learner plans, over those in micro-batches with a fixed number of rows in log order, each padded to its
longest
row. Both have the same token budget, including padding. The two run in turns; the figure is the median over rounds of the ratio within a
round. `padding_fraction` and `padded_padding_fraction` are the shares of positions that are padding on each side.
`attention_padding_fraction` is the share in the blocks in which attention runs on CPU; no other layer has padding.
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
    from torch import Tensor

    from polyreme_trainer.megatron.batches.packing import PackedIds
    from polyreme_trainer.megatron.models.policy import Policy

TARGET = {"packed_vs_padded": 1.3}
BUDGET, LONGEST = 4096, 512


def make_policy(folder: Path, threads: int) -> "Policy":
    """Builds a Qwen2 of 3 million parameters in this process, as the learner does."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from polyreme.config.trainer import ParallelConfig
    from polyreme_trainer.megatron.device import Device
    from polyreme_trainer.megatron.huggingface.families import load_architecture
    from polyreme_trainer.megatron.models.build import init_parallel
    from polyreme_trainer.megatron.models.policy import Policy

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


def both_plans(policy: "Policy", count: int) -> "dict[str, list[tuple[Tensor | PackedIds, Tensor]]]":
    """Returns inputs and targets of each side's micro-batches over the same sequences."""
    import numpy as np
    import torch

    from polyreme_trainer.megatron.batches.batch import IGNORE, Sequences, cost_of
    from polyreme_trainer.megatron.parallel.shard import DataShard

    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(60), 0.9, count), 8, LONGEST).astype(np.int64)
    ids = [random.integers(1, policy.arch.vocab, length) for length in lengths]
    sequences = Sequences(ids, np.ones(int((lengths - 1).sum()), dtype=np.float32))
    rows = max(1, BUDGET // int(lengths.max()))
    padded: list[tuple[Tensor | PackedIds, Tensor]] = []
    for first in range(0, count, rows):
        each = [torch.from_numpy(row) for row in ids[first : first + rows]]
        inputs, targets = (
            torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=filling)
            for part, filling in (([row[:-1] for row in each], 0), ([row[1:] for row in each], IGNORE))
        )
        padded.append((inputs, targets))
    shard = DataShard(policy.device.torch, BUDGET)
    packed = shard.micro_batches(sequences, np.arange(count), cost_of(policy.arch))
    return {"padded": padded, "packed": [(batch.ids, batch.targets) for batch in packed]}


def attention_padding(policy: "Policy", batches: "list[tuple[Tensor | PackedIds, Tensor]]") -> float:
    """Returns the share of positions in attention's blocks that are padding."""
    import numpy as np

    from polyreme_trainer.megatron.batches.attention_blocks import plan_blocks
    from polyreme_trainer.megatron.batches.attention_layout import cut_blocks
    from polyreme_trainer.megatron.batches.packing import PackedIds

    counts = [np.array(ids.lengths) for ids, _ in batches if isinstance(ids, PackedIds)]
    plans = [plan_blocks(each, policy.arch.queries) for each in counts]
    shapes = [shape for each in zip(counts, plans, strict=True) for shape in cut_blocks(*each, policy.device.torch).shapes]
    return 1 - float(sum(each.sum() for each in counts)) / sum(rows * width for rows, width in shapes)


def seconds(policy: "Policy", batches: "list[tuple[Tensor | PackedIds, Tensor]]") -> float:
    """Returns the time of a forward and backward pass over all micro-batches, in seconds."""
    began = time.perf_counter()
    for ids, targets in batches:
        policy.logprobs(ids, targets).mean().backward()
    return time.perf_counter() - began


def trained_tokens(batches: "list[tuple[Tensor | PackedIds, Tensor]]") -> int:
    """Returns the number of targets, all of which are trained on."""
    from polyreme_trainer.megatron.batches.batch import IGNORE

    return sum(int((targets != IGNORE).sum()) for _, targets in batches)


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
    padding = {
        side: 1 - trained_tokens(batches) / sum(targets.numel() for _, targets in batches) for side, batches in plans.items()
    }
    for side, batches in plans.items():
        spent = statistics.median(each[side] for each in rounds)
        print(f"{side}: {len(batches)} micro-batches, {padding[side]:.0%} padding, {spent:.3f} s")
    measured = {
        "packed_vs_padded": round(statistics.median(each["padded"] / each["packed"] for each in rounds), 3),
        "padding_fraction": round(padding["packed"], 3),
        "padded_padding_fraction": round(padding["padded"], 3),
        "attention_padding_fraction": round(attention_padding(policy, plans["packed"]), 3),
    }
    met = measured["packed_vs_padded"] >= TARGET["packed_vs_padded"]
    print(json.dumps({"bench": "packing", "measured": measured, "target": TARGET, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
