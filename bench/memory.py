"""The estimated memory of a learner rank compared with the peak memory of its tensors over two iterations, on CPU.

    python bench/memory.py [--only CASE] [--resident]

`memory_vs_estimate` (0.9 to 1.1): for each case, the peak of torch's allocator over the estimate that the learner prints at its start. The
figure is that of the case farthest from 1. The learner is the real one (`RunEngine`), with 25 to 42 million parameters. It trains two
iterations of full micro-batches, and the optimizer's moments exist from the first one on. torch's profiler counts every tensor that torch
allocates, from before the first model to the end. Neither side counts the interpreter and its libraries, the arena, or mapped files.

With `trainer.offload`, three peaks are compared with their estimates: that of the device, that of the host, and that of both together, which are
the same memory on CPU. The peak of the device is also compared in each phase: the micro-batches and the optimizer steps of each role, and the
copies of the actor's weights into another model.

--resident instead compares resident memory, as the system counts it, with the estimate including the arena. It depends on the fragmentation
of the heap, so it has no target.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from memory_side.peaks import tensor_peaks

LOW, HIGH = 0.9, 1.1
PROMPT, RESPONSE = 8, 248
LLAMA = {"max_position_embeddings": 512, "tie_word_embeddings": False}
WIDE: dict[str, Any] = {
    "model": ("Llama", {**LLAMA, "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12}),
    "heads": (8, 4),
    "tokens": 2048,
}
SHORT: dict[str, Any] = {
    "model": ("Llama", {**LLAMA, "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6}),
    "heads": (8, 4),
    "tokens": 256,
    "response": 120,
}
"""A smaller case, with few tokens in a micro-batch unless it sets more."""
SMALL = {**SHORT, "groups": 2, "group_size": 2, "dtype": "bfloat16"}
"""With fewer tokens, because many processors compute slowly in bfloat16."""
EXPERTS: dict[str, Any] = {
    "model": ("Qwen3Moe", {"vocab_size": 2048, "hidden_size": 384, "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4, "num_hidden_layers": 6}),
    "heads": (6, 2),
    "algorithm": {"preset": "dapo"},
    "tokens": 2048,
}  # fmt: skip
OFFLOAD = {"optimizer": True, "idle_models": True}
PART_BYTES = 64 << 20
"""In the place of `PART_BYTES` of the learner and of the estimate: so that the optimizer of a model of this size moves in several parts."""
CASES: dict[str, dict[str, Any]] = {
    "layers": {**WIDE, "algorithm": {"preset": "grpo"}},
    "adapters": {**WIDE, "algorithm": {"preset": "rloo"}, "lora": {"rank": 16}},
    "vocabulary": {
        "model": ("Qwen2", {"vocab_size": 65536, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 2, "tie_word_embeddings": True}),
        "heads": (6, 2),
        "algorithm": {"preset": "ppo"},
        "tokens": 512,
    },
    "experts": EXPERTS,
    "tensor": {**WIDE, "algorithm": {"preset": "ppo"}, "parallel": {"tensor": 2}},
    "expert_ranks": {**EXPERTS, "tokens": 1024, "response": 120, "parallel": {"data": 2, "expert": 2}},
    "selective": {**SHORT, "tokens": 1024, "algorithm": {"preset": "dapo"}, "recompute": "selective"},
    "full": {**SHORT, "tokens": 1024, "algorithm": {"preset": "dapo"}, "recompute": "full"},
    "bfloat16": {**SMALL, "algorithm": {"preset": "dapo"}},
    "offload": {**SMALL, "algorithm": {"preset": "ppo"}, "offload": OFFLOAD, "ema_decay": 0.9},
    "offload_float32": {**SHORT, "algorithm": {"preset": "ppo"}, "offload": OFFLOAD},
    "offload_optimizer": {**SMALL, "algorithm": {"preset": "ppo"}, "offload": {"optimizer": True}},
    "offload_idle": {**SMALL, "algorithm": {"preset": "ppo"}, "offload": {"idle_models": True}},
    "offload_adapters": {**SMALL, "algorithm": {"preset": "ppo"}, "offload": OFFLOAD, "lora": {"rank": 16}},
    "data": {**WIDE, "algorithm": {"preset": "dapo"}, "parallel": {"data": 2}},
    "context": {**WIDE, "algorithm": {"preset": "dapo"}, "parallel": {"context": 2}},
    "pipeline": {**WIDE, "algorithm": {"preset": "dapo"}, "parallel": {"pipeline": 2}},
}  # fmt: skip


def save_model(case: str, path: Path) -> None:
    """Saves the case's model with random weights."""
    import torch
    import transformers

    kind, fields = CASES[case]["model"]
    heads, groups = CASES[case]["heads"]
    config = getattr(transformers, f"{kind}Config")(**fields, num_attention_heads=heads, num_key_value_heads=groups)
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)


def config_of(case: str, path: Path) -> Any:
    from polyreme.config.run import RunConfig

    response = CASES[case].get("response", RESPONSE)
    return RunConfig.model_validate(
        {
            "iterations": 2,
            "groups_per_iteration": CASES[case].get("groups", 4),
            "group_size": CASES[case].get("group_size", 4),
            "output_dir": path / "runs",
            "model": {"path": path, "dtype": CASES[case].get("dtype", "float32")},
            "data": {"train": path / "unread.jsonl", "max_prompt_tokens": PROMPT},
            "rollout": {"max_new_tokens": response, "max_model_len": PROMPT + response},
            "reward": {"rewards": [{"name": "exact"}]},
            "algorithm": CASES[case]["algorithm"],
            "trainer": {
                "optimizer": {"lr": 1e-5},
                "micro_batch_tokens": CASES[case]["tokens"],
                "parallel": CASES[case].get("parallel", {}),
                "lora": CASES[case].get("lora"),
                "offload": CASES[case].get("offload", {}),
                "recompute": CASES[case].get("recompute"),
                "ema_decay": CASES[case].get("ema_decay"),
            },
        }
    )


def batch_of(config: Any, iteration: int) -> Any:
    """Returns groups of full-length samples, half of which have the reward 1."""
    import numpy as np

    from polyreme.experience.record_codec import encode_group
    from polyreme.experience.records import GroupRecord, SampleRecord
    from polyreme_trainer.learner.engine import PlannedBatch

    generator = np.random.default_rng(iteration)
    length = config.rollout.max_new_tokens
    ones = np.ones(length, dtype=np.uint8)

    def tokens(count: int) -> Any:
        return generator.integers(1, 2000, count).astype(np.int32)

    def group(index: int) -> bytes:
        samples = [
            SampleRecord(tokens(length), np.full(length, -5, np.float32), ones, 1, [(iteration - 1, 0, length)], float(place % 2))
            for place in range(config.group_size)
        ]
        return encode_group(GroupRecord(index=index, attempt=1, prompt_ids=tokens(PROMPT), samples=samples))

    indices = tuple(range(config.groups_per_iteration))
    return PlannedBatch(iteration, indices, tuple(group(index) for index in indices))


def train(config: Any, ranks: Any, device: Any, run_id: str) -> None:
    """Runs two iterations of the learner's engine."""
    from polyreme_trainer.megatron.run_engine import RunEngine

    engine = RunEngine(config, {}, run_id, ranks, device)
    engine.begin_iterations()
    if config.recipe.kl is not None:
        engine.make_reference(config.model.path)
    for iteration in (1, 2):
        engine.train(batch_of(config, iteration))
    engine.close()


def measure(case: str, path: Path, resident: bool) -> None:
    """Runs in the child: prints the peaks in bytes as JSON on the last line."""
    from polyreme_trainer.learner.leader import Ranks
    from polyreme_trainer.megatron.device import Device
    from polyreme_trainer.megatron.models.build import close_parallel, init_parallel
    from polyreme_trainer.megatron.offload import optimizer_parts
    from polyreme_trainer.megatron.parallel.channel import BroadcastChannel

    config, rank = config_of(case, path), int(os.environ["RANK"])
    device = Device("cpu")
    device.seed(0)
    init_parallel(config.trainer.parallel, device)
    ranks = Ranks(rank, BroadcastChannel(device.torch) if config.trainer.parallel.world_size > 1 else None)

    def work() -> None:
        train(config, ranks, device, f"bench-memory-{os.environ['MASTER_PORT']}")

    with mock.patch.object(optimizer_parts, "PART_BYTES", PART_BYTES):
        files = {file.stat().st_size for file in path.glob("*.safetensors")}
        peaks = {"both": resident_peak(work)} if resident else tensor_peaks(work, path / f"trace{rank}.json", files)
    print(json.dumps(peaks), flush=True)
    ranks.close()
    close_parallel()


def resident_peak(work: Callable[[], None]) -> int:
    """Returns the growth of resident memory in bytes, from the moment when free heap pages were returned to the peak."""
    import ctypes

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))

    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def measured_peaks(case: str, path: Path, resident: bool) -> dict[str, int]:
    """Returns the largest peaks of all ranks. Every rank runs in its own process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = config_of(case, path).trainer.parallel.world_size
    command = [sys.executable, __file__, "--measure", case, "--model", str(path), *(["--resident"] if resident else [])]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    children = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(world)
    ]
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"expected the ranks of case {case} to end; found exit codes {[child.returncode for child in children]}")
    peaks: list[dict[str, int]] = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {name: max(each[name] for each in peaks) for name in peaks[0]}


def estimated_peaks(config: Any, resident: bool) -> dict[str, int]:
    """Returns the estimates of the peaks, by the names of `tensor_peaks`. Without offload only that of all memory."""
    from polyreme_trainer.megatron.huggingface.families import load_architecture
    from polyreme_trainer.memory import estimate
    from polyreme_trainer.memory.memory_estimate import learner_memory, micro_batch_of, models_of
    from polyreme_trainer.memory.sharding import shardings

    with mock.patch.object(estimate, "PART_BYTES", PART_BYTES):
        memory, trainer = learner_memory(config), config.trainer
        arena = sum(term.nbytes for machine in memory.machines for term in [machine.arena] if term and resident)
        found = {"both": memory.rank.all_bytes + arena}
        if resident or not trainer.offload.is_set:
            return found
        models, batch = models_of(config), micro_batch_of(config)
        for sharding in shardings(load_architecture(config.model.path), trainer.parallel):
            for name, moment in estimate.moments(models, sharding, batch, trainer.offload).items():
                for key, nbytes in ((name, moment.nbytes), ("device", moment.nbytes), ("host", moment.host_bytes)):
                    found[key] = max(found.get(key, 0), nbytes)
        return found


def compare(case: str, folder: Path, resident: bool) -> float:
    """Prints estimates and peaks. Returns the ratio farthest from 1."""
    path = folder / case
    save_model(case, path)
    estimated = estimated_peaks(config_of(case, path), resident)
    measured = measured_peaks(case, path, resident)
    for name, nbytes in estimated.items():
        title = case if name == "both" else f"{case}, {name}"
        print(
            f"{title:>40} {nbytes / 2**20:>14,.0f} {measured[name] / 2**20:>14,.0f} {measured[name] / nbytes:>8.3f}", flush=True
        )
    return max((measured[name] / nbytes for name, nbytes in estimated.items()), key=lambda ratio: abs(ratio - 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CASES))
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--measure", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, args.model, args.resident)
        return 0
    print(f"{'case':>40} {'estimated MiB':>14} {'measured MiB':>14} {'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        ratios = [compare(case, Path(folder), args.resident) for case in ([args.only] if args.only else CASES)]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    met = all(LOW <= ratio <= HIGH for ratio in ratios)
    name = "resident_vs_estimate" if args.resident else "memory_vs_estimate"
    target = {} if args.resident else {name: [LOW, HIGH]}
    print(json.dumps({"bench": "memory", "measured": {name: round(worst, 3)}, "target": target, "met": met or args.resident}))
    return 0 if met or args.resident else 1


if __name__ == "__main__":
    raise SystemExit(main())
