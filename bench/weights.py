"""What a weight push costs: writing a version into the arena against plain memory copies, and a real replica's swap against its reload.

    python bench/weights.py [--gib 1] [--repeats 5] [--only arena|swap]

`arena_vs_memcpy` (>= 0.5): bytes per second of copying a rank's megatron parameters into an arena slot by the layout table, as the
learner does, over those of one plain torch copy of as many bytes, both with one thread; the worst of tensor parallel 1 and 2.
Digests are computed in the publisher's thread and reported apart.
"""

import argparse
import json
import os
import statistics
import time
import uuid
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from polyreme_trainer.model import layout
from polyreme_trainer.model.architecture import Architecture, Rope

from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal, verify
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest, tensor_views

TARGETS = {"arena_vs_memcpy": 0.5}
LAYERS_PER_GIB = 20


def architecture(gib: float) -> Architecture:
    """An untied Qwen2 of about `gib` GiB in fp32: 20 layers of 12.6M parameters and 2 x 8k rows of 1024 per GiB."""
    return Architecture(
        family="qwen2",
        layers=max(2, round(LAYERS_PER_GIB * gib)),
        hidden=1024,
        heads=16,
        kv_heads=4,
        head_dim=64,
        ffn=3072,
        vocab=8003,
        tied=False,
        qkv_bias=True,
        norm_eps=1e-6,
        max_position=1024,
        rope=Rope(10000.0),
    )


def seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def parameters(arch: Architecture, tp: int) -> list[tuple[torch.Tensor, str, layout.Index]]:
    """Source view, tensor name and place of every primary slice of all `tp` ranks."""
    pieces = []
    for tp_rank in range(tp):
        rank = layout.Rank(tp_rank, tp)
        params = {name: torch.rand(shape) for name, shape in layout.param_shapes(arch, rank).items()}
        slices = [piece for piece in layout.rank_slices(arch, rank) if piece.primary]
        pieces += [(params[s.param][s.param_index], s.hf_name, s.hf_index) for s in slices]
    return pieces


def write(pieces: list[tuple[torch.Tensor, str, layout.Index]], views: dict[str, torch.Tensor]) -> None:
    for source, name, index in pieces:
        views[name][index].copy_(source)


def bench_arena(gib: float, repeats: int) -> dict[str, float]:
    arch = architecture(gib)
    plan = plan_manifest([TensorSpec(name, "F32", shape) for name, shape in layout.hf_shapes(arch).items()])
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
    arena: Arena, plan: Manifest, pieces: list[tuple[torch.Tensor, str, layout.Index]], tp: int, repeats: int
) -> dict[str, float]:
    """Writes and plain copies in turn, so that both meet the same machine; the slots in turn, as in training."""
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
        writes.append(seconds(lambda slot=slot: write(pieces, views[slot])))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the synthetic version")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = bench_arena(options.gib, options.repeats)
    for name, value in measured.items():
        print(f"{name:28} {value:10.3f}")
    met = all(measured[name] >= least for name, least in TARGETS.items())
    print(json.dumps({"bench": "weights", "measured": measured, "target": TARGETS, "met": met}))


if __name__ == "__main__":
    main()
