"""The cost of a weight push: writing a version into the arena compared with memory copies, and a real replica's swap compared with its reload.

    python bench/weights.py [--gib 1] [--repeats 5] [--only arena|stream|swap|reload] [--large]

`arena_vs_memcpy` (>= 0.5): bytes per second of copying a rank's megatron parameters into an arena slot by the layout table, as the
learner does, over those of one plain torch copy of as many bytes, both with one thread; the worse of tensor parallel 1 and 2.
Digests are reported separately.

`reload_vs_bytes`: time of the plain reload of the demo's model (0.8M parameters) in a vLLM worker, over one plain copy of as many bytes, in
an otherwise idle process with one thread. `reload_vs_vllm` (<= 0.5): the same over vLLM's own layer-wise reload, whose ratio to the copy is
`vllm_reload_vs_bytes`. With --large also for 100M parameters (`large_...`).

`stall_over_reload_ms`: the pause of generation for a swap while 128 samples are decoded, minus the plain reload of the same weights
on the idle replica; medians of 40 swaps each. A vLLM replica serves the demo's model, and the learner's publisher pushes to it. The pause
begins when the running decoding step has ended, and ends when the engine has answered that it continues, 2 to 5 ms after it does.
`batch_cost_per_swap_ms` is the end-to-end time that one swap adds to a fixed batch of samples. `stall_vs_reload` (<= 1.05): that pause over
vLLM's own plain reload, in processor time of an otherwise idle process. `stall_floor_vs_reload` is the part of it besides the load: the
calls to the engine.

`stream_vs_socket` (>= 0.35): bytes per second of a verified stream to a replica that cannot map the arena, over those of one plain TCP
socket; both on the loopback, in turn, median of the ratios. `stream_vs_shaped_link` (>= 0.9): the same into a network namespace behind a
link of 2.5 Gbit/s, over the link's rate (the headers of Ethernet, IP and TCP alone take 4% of it). `receivers_N_s`: seconds from the
publication of a version to the last of N acknowledgements, all by stream; the total rate in bytes per second is printed too.

`late_joiner_s`: seconds from the start of a vLLM replica that joins a run and cannot map the arena to its first token, which must equal
that of the earlier replica. `late_joiner_after_lease_s`: the part of it after vLLM's start.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from weights_side import reloads, streams, swaps

from polyreme.config.load import load_config
from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal, verify
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest, tensor_views
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families import find_family
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.rope import Rope

LEAST = {"arena_vs_memcpy": 0.5, "stream_vs_socket": 0.35, "stream_vs_shaped_link": 0.9}
MOST = {"stall_vs_reload": 1.05, "reload_vs_vllm": 0.5}
LAYERS_PER_GIB = 20

TASK = Path(__file__).parent.parent / "examples" / "running_total"
RECEIVERS = (1, 4, 16)


def architecture(gib: float) -> Architecture:
    """Returns an untied Qwen2 of about `gib` GiB in fp32: 20 layers of 12.6M parameters and 2 x 8k rows of 1024 per GiB."""
    return Architecture(
        family=find_family("qwen2"),
        layers=max(2, round(LAYERS_PER_GIB * gib)),
        hidden=1024,
        heads=16,
        kv_heads=4,
        head_dim=64,
        ffn=3072,
        vocab=8003,
        head="untied",
        norm_eps=1e-6,
        max_position=1024,
        rope=Rope(10000.0),
    )


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def parameters(arch: Architecture, tp: int) -> list[tuple[torch.Tensor, str, hf_mapping.Index]]:
    """Returns source view, tensor name and position of every primary slice of all `tp` ranks."""
    pieces = []
    for tp_rank in range(tp):
        rank = hf_mapping.Rank(tp_rank, tp)
        params = {name: torch.rand(shape) for name, shape in hf_mapping.param_shapes(arch, rank).items()}
        slices = [piece for piece in hf_mapping.rank_slices(arch, rank) if piece.primary]
        pieces += [(params[s.param][s.param_index], s.hf_name, s.hf_index) for s in slices]
    return pieces


def write(pieces: list[tuple[torch.Tensor, str, hf_mapping.Index]], views: dict[str, torch.Tensor]) -> None:
    for source, name, index in pieces:
        views[name][index].copy_(source)


def bench_arena(gib: float, repeats: int) -> dict[str, float]:
    arch = architecture(gib)
    plan = plan_manifest([TensorSpec(name, "F32", shape) for name, shape in hf_mapping.hf_shapes(arch).items()])
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    results: dict[str, float] = {"gib": plan.nbytes / 2**30}
    created = time.perf_counter()
    arena = Arena.create(run_id, plan.nbytes)
    results["arena_create_s"] = time.perf_counter() - created
    try:
        for tp in (1, 2):
            results |= measure_writes(arena, plan, parameters(arch, tp), tp, repeats)
        sealed = seal(plan.stamped(run_id, 1, 1), arena.slot_view(0))
        results["digest_gb_s"] = (
            plan.nbytes / 1e9 / statistics.median(seconds(lambda: verify(sealed, arena.slot_view(0))) for _ in range(repeats))
        )
    finally:
        arena.close()
    results["arena_vs_memcpy"] = min(results[f"write_tp{tp}_gb_s"] / results[f"memcpy_beside_tp{tp}_gb_s"] for tp in (1, 2))
    return results


def measure_writes(
    arena: Arena, plan: Manifest, pieces: list[tuple[torch.Tensor, str, hf_mapping.Index]], tp: int, repeats: int
) -> dict[str, float]:
    """Measures writes and plain copies in turn, so that both run under the same load. The slots alternate, as in training."""
    source = torch.rand(plan.nbytes // 4)
    target = torch.zeros_like(source)
    views = [
        {name: torch.from_numpy(view) for name, view in tensor_views(plan, arena.slot_view(slot)).items()}
        for slot in range(arena.slots)
    ]
    writes, copies = [], []
    for turn in range(repeats + 1):
        slot = turn % arena.slots
        arena.begin(slot)
        writes.append(seconds(partial(write, pieces, views[slot])))
        arena.complete(slot, version=turn, term=1)
        copies.append(seconds(lambda: target.copy_(source)))
    for piece, name, index in pieces:
        if not torch.equal(views[slot][name][index], piece):
            raise SystemExit(f"{name}: the slot does not hold what was written")
    gigabytes = plan.nbytes / 1e9
    return {
        f"write_tp{tp}_gb_s": gigabytes / statistics.median(writes[1:]),
        f"memcpy_beside_tp{tp}_gb_s": gigabytes / statistics.median(copies[1:]),
    }


async def bench_stream(gib: float, repeats: int) -> dict[str, float]:
    size = int(gib * 2**30)
    return {
        **await streams.against_socket(size, repeats),
        **await streams.against_shaped_link(size // 4, repeats),
        **await streams.to_many(size // 8, RECEIVERS, max(1, repeats // 2), load_config(TASK / "run.yaml")),
    }


def stalls(measured: dict[str, float]) -> dict[str, float]:
    """Returns the stall of a swap under load over vLLM's own plain reload, and the part of it without the load."""
    floor = measured["stall_ms"] - measured["reload_under_load_ms"]
    return {
        name: part / measured["vllm_reload_ms"]
        for name, part in (("stall_vs_reload", measured["stall_ms"]), ("stall_floor_vs_reload", floor))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the synthetic version")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["arena", "stream", "swap", "reload"])
    parser.add_argument("--large", action="store_true", help="measure the reload of 100M parameters, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured: dict[str, float] = {}
    if options.only in (None, "arena"):
        measured |= bench_arena(options.gib, options.repeats)
    if options.only in (None, "stream"):
        measured |= asyncio.run(bench_stream(options.gib, options.repeats))
    if options.only in (None, "swap", "reload"):
        measured |= reloads.bench_reload(options.large)
    if options.only in (None, "swap"):
        measured |= asyncio.run(swaps.bench_swap())
        measured |= stalls(measured)
    for name, value in measured.items():
        print(f"{name:28} {value:10.3f}")
    target = {name: limit for name, limit in (LEAST | MOST).items() if options.only is None or name in measured}
    met = all(measured[name] >= limit if name in LEAST else measured[name] <= limit for name, limit in target.items())
    print(json.dumps({"bench": "weights", "measured": measured, "target": target, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
