"""The machines of the learner together write every parameter once, each those of its ranks."""

import math
from dataclasses import replace

import pytest

from polyreme.config.trainer import ParallelConfig
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.huggingface.hf_mapping import hf_shapes, rank_slices
from polyreme_trainer.megatron.versions.version_writer import plan_parts
from polyreme_trainer.memory.sharding import shardings, written_parameters
from support.published import CONFIGS


def architecture(layers: int) -> Architecture:
    return replace(read_architecture(HfConfig(CONFIGS["Qwen3-235B-A22B"], "model")), layers=layers, experts=8)


def planned(arch: Architecture, parallel: ParallelConfig) -> list[int]:
    """The parameters of the parts that the version writer plans from the slices that its ranks write."""
    written: list[set[str]] = []
    for sharding in shardings(arch, parallel):
        for place in range(parallel.tensor * parallel.copies):
            pieces = rank_slices(arch, sharding.rank.at(place)) if place < sharding.rank.places else []
            written.append({piece.hf_name for piece in pieces if piece.primary})
    shapes, counts = hf_shapes(arch), [0] * parallel.nodes
    for machine, names in enumerate(plan_parts(written, parallel.nodes)):
        for name in names:
            counts[machine] += math.prod(shapes[name])
    return counts


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        ({"nodes": 1, "tensor": 2, "data": 4}, 1),
        ({"nodes": 2, "data": 4}, 1),
        ({"nodes": 2, "pipeline": 2, "tensor": 2}, 2),
        ({"nodes": 2, "pipeline": 2, "virtual_pipeline": 2}, 2),
        ({"nodes": 2, "data": 4, "expert": 4}, 2),
        ({"nodes": 4, "data": 4, "context": 2, "expert": 4}, 2),
        ({"nodes": 2, "pipeline": 2, "data": 2, "tensor": 2, "expert": 2, "expert_tensor": 1}, 2),
    ],
)
def test_the_parts_are_those_that_the_version_writer_plans(layout: dict[str, int], parts: int) -> None:
    arch, parallel = architecture(layers=4), ParallelConfig(**layout)
    found = written_parameters(arch, parallel)
    assert found == planned(arch, parallel)
    assert (sum(found), sum(count > 0 for count in found)) == (arch.parameters, parts)
