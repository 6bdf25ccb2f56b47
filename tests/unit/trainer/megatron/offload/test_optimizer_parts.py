"""Steps of an optimizer's parts against one step of all, on plain tensors. tests/integration/test_offload.py has megatron-core's optimizers."""

from typing import Any

import pytest
import torch

from polyreme.config.trainer import OffloadConfig
from polyreme_trainer.megatron.offload.fragments import MASTER, Fragment
from polyreme_trainer.megatron.offload.host_memory import HostMemory
from polyreme_trainer.megatron.offload.optimizer_parts import OptimizerParts, cut

SIZES = (7, 300, 5, 64)


def fragments_of(dtype: torch.dtype) -> list[Fragment]:
    """Parameters of several sizes, stepped by one AdamW with two groups, as megatron-core makes them."""
    params = [torch.nn.Parameter(torch.linspace(-1, 1, size).to(dtype)) for size in SIZES]
    mains = params if dtype == torch.float32 else [param.detach().clone().float() for param in params]
    groups: list[dict[str, Any]] = [{"params": mains[:2]}, {"params": mains[2:], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3, fused=True)
    copied = dtype != torch.float32
    return [
        Fragment(str(place), param, 0, param.numel(), main, copied, adam)
        for place, (param, main) in enumerate(zip(params, mains, strict=True))
    ]


def set_gradients(fragments: list[Fragment], step: int) -> None:
    for fragment in fragments:
        fragment.main.grad = torch.cos(torch.arange(float(fragment.main.numel())) + step)


def bytes_on_device(fragments: list[Fragment]) -> int:
    return sum(tensor.untyped_storage().nbytes() for each in fragments for tensor in each.state_tensors().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_of_parts_are_the_bits_of_whole_steps(dtype: torch.dtype) -> None:
    whole, moved = fragments_of(dtype), fragments_of(dtype)
    host = HostMemory(OffloadConfig(optimizer=True), pin=False)
    parts = OptimizerParts(moved, host, part_bytes=1000)
    assert bytes_on_device(moved) == 0
    for step in range(3):
        for fragments in (whole, moved):
            set_gradients(fragments, step)
        whole[0].adam.step()
        for fragment in whole:
            if fragment.copied:
                fragment.param.data.copy_(fragment.main)
        parts.step([])
        assert bytes_on_device(moved) == 0
    for one, other in zip(whole, moved, strict=True):
        assert torch.equal(one.param, other.param)
        tensors = other.state_tensors()
        assert (MASTER in tensors) == (dtype == torch.bfloat16)
        for kind, tensor in one.state_tensors().items():
            assert torch.equal(tensor, parts.now(other, tensors[kind]))
    assert host.take_moves().nbytes > 0 == host.take_moves().nbytes


def test_a_visit_brings_one_part_and_keeps_what_it_changes() -> None:
    fragments = fragments_of(torch.bfloat16)
    parts = OptimizerParts(fragments, HostMemory(OffloadConfig(optimizer=True), pin=False), part_bytes=1000)
    visited = []
    for number, part in enumerate(parts.visits()):
        assert bytes_on_device(fragments) == sum(4 * fragment.main.numel() for fragment in part)
        for fragment in part:
            fragment.main.fill_(number)
        visited.append([fragment.name for fragment in part])
    assert visited == [["0"], ["1"], ["2", "3"]]
    assert [parts.now(each, each.main).unique().tolist() for each in fragments] == [[0], [1], [2], [2]]


def test_a_part_is_as_large_as_allowed_or_one_fragment() -> None:
    fragments = fragments_of(torch.float32)
    assert [each.state_bytes for each in fragments] == [8 * size for size in SIZES]
    for limit, expected in ((0, [1, 1, 1, 1]), (8 * 307, [2, 2]), (10**6, [4])):
        assert [len(part) for part in cut(fragments, limit)] == expected
    assert cut([], 1000) == []
