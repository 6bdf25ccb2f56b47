"""Attention over packed sequences equals attention over each single sequence, for any division into blocks."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from polyreme_trainer.megatron.batches.attention_blocks import CALL_FLOPS, plan_blocks
from polyreme_trainer.megatron.batches.attention_layout import cut_blocks
from polyreme_trainer.megatron.batches.context_cut import cut_sequences
from polyreme_trainer.megatron.batches.packing import PackedIds, Packing, packing
from polyreme_trainer.megatron.layers.accelerator import BATCHED, flash
from polyreme_trainer.megatron.layers.attention import (
    Attention,
    in_blocks,
    in_halves,
    masked_attention,
    merged_attention,
    of_copies,
)
from polyreme_trainer.megatron.layers.norm import TorchRmsNorm
from polyreme_trainer.megatron.mcore import TransformerConfig

lengths_of = st.lists(st.integers(1, 30), min_size=1, max_size=12)
CPU = torch.device("cpu")


def packed(lengths: list[int], features: int = 4, device: torch.device = CPU, dtype: torch.dtype = torch.float64) -> Packing:
    ids = PackedIds(torch.zeros(sum(lengths), dtype=torch.int64, device=device), tuple(lengths))
    return packing(ids, features, torch.zeros(max(lengths), 2, device=device), None, dtype)


@given(lengths_of, st.sampled_from([1, 10**3, 10**5, 10**9]))
def test_blocks_have_every_token_once(lengths: list[int], features: int) -> None:
    counts = np.array(lengths)
    plan = plan_blocks(counts, features)
    assert sorted(itertools.chain.from_iterable(part.tolist() for part in plan)) == list(range(len(lengths)))
    blocks = cut_blocks(counts, plan, CPU)
    assert [rows * width for rows, width in blocks.shapes] == [len(part) * counts[part].max() for part in plan]
    tokens = torch.arange(sum(lengths))
    positions = tokens if blocks.gather is None else blocks.gather
    assert torch.equal(positions[blocks.scatter], tokens)
    assert len(positions) == sum(rows * width for rows, width in blocks.shapes)


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from([1, 10**4, 10**5, 10**6]))
def test_no_other_cut_of_the_sorted_sequences_costs_less(values: list[int], features: int) -> None:
    lengths = np.array(sorted(values, reverse=True))

    def cost(parts: list[np.ndarray]) -> float:
        return sum(7 * features * len(part) * float(lengths[part].max()) ** 2 + CALL_FLOPS for part in parts)

    every = []
    for cuts in itertools.product([False, True], repeat=len(lengths) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(lengths)]
        every.append(cost([np.arange(a, b) for a, b in itertools.pairwise(edges)]))
    assert cost(plan_blocks(lengths, features)) == pytest.approx(min(every))


def test_sequences_of_one_length_are_one_block_that_is_not_copied() -> None:
    lengths = np.full(5, 7)
    blocks = cut_blocks(lengths, plan_blocks(lengths, 64), CPU)
    assert (blocks.shapes, blocks.gather) == (((5, 7),), None)


@contextmanager
def keeping() -> Iterator[list[Tensor]]:
    """Yields the tensors that autograd keeps for the backward pass."""
    kept: list[Tensor] = []

    def keep(each: Tensor) -> Tensor:
        kept.append(each)
        return each

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        yield kept


def test_the_backward_pass_keeps_no_fused_queries_keys_and_values() -> None:
    """Only the values are still needed after the rotation. A view of them would keep the whole output of the fused layer."""
    fused = torch.randn(8, 2, 12, dtype=torch.float64, requires_grad=True)
    query, key, value = (fused * 1).split(4, dim=-1)
    with keeping() as kept:
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, cuda_graph_scope=[])
        output = Attention(config, 1)(query, key, value, None, packed_seq_params=packed([8]))
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    assert query.untyped_storage().data_ptr() not in storages
    assert sorted(storages.values(), reverse=True)[:4] == [8 * 2 * 4 * 8] * 4  # rotated queries and keys, values, output
    assert output.shape == (8, 8)


def test_a_norm_of_an_accelerator_keeps_only_its_input() -> None:
    fused = torch.randn(8, 2, 12, requires_grad=True) * 1
    with keeping() as kept:
        TorchRmsNorm(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, cuda_graph_scope=[]), 4, 1e-6)(
            fused[..., 4:8]
        )
    assert all(each.untyped_storage().nbytes() <= 8 * 2 * 4 * 4 for each in kept)
    assert kept


@pytest.mark.parametrize("features", [4, 10**9], ids=["one block", "many blocks"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("lengths", [[5, 9, 1, 5, 2], [6, 6, 6], [8], [9, 8, 3]])
def test_attention_and_gradients_are_those_of_each_sequence_alone(lengths: list[int], window: int | None, features: int) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = [(sum(lengths), heads, 4) for heads in (4, 2, 2)]
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    weight = torch.randn(*shapes[0], generator=generator, dtype=torch.float64)
    query, key, value = inputs
    found = in_blocks(query, key, value, packed(lengths, features), 0.7, window)
    expected = alone(inputs, lengths, window)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = (torch.autograd.grad((each * weight).sum(), inputs) for each in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("features", [4, 10**9], ids=["one block", "many blocks"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("lengths", "ranks"), [([5, 9, 1, 5, 2], 2), ([12, 6, 12], 3), ([8], 2), ([1, 1], 2)])
def test_context_ranks_together_compute_each_sequence_alone(
    lengths: list[int], ranks: int, window: int | None, features: int
) -> None:
    generator = torch.Generator().manual_seed(4)
    shapes = [(sum(lengths), heads, 4) for heads in (4, 2, 2)]
    inputs = [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    weight = torch.randn(*shapes[0], generator=generator, dtype=torch.float64)
    ids, query = PackedIds(torch.zeros(sum(lengths), dtype=torch.int64), tuple(lengths)), inputs[0]
    cuts = [cut_sequences(ids.lengths, rank, ranks, CPU) for rank in range(ranks)]
    key, value = (torch.cat([each.index_select(0, cut.tokens) for cut in cuts]) for each in inputs[1:])
    found = torch.zeros_like(query)
    for cut in cuts:
        made = packing(ids, features, torch.zeros(max(lengths), 2), None, torch.float64, cut)
        attend = partial(in_blocks, scale=0.7, window=window)
        found = found.index_copy(0, cut.tokens, in_halves(attend, query.index_select(0, cut.tokens), key, value, made))
    expected = alone(inputs, lengths, window)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = (torch.autograd.grad((each * weight).sum(), inputs) for each in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


BEGINNINGS: list[tuple[list[int], list[int]]] = [
    ([5, 3, 4], [0, 1, 2, 3, 4, 0, 1, 5, 0, 1, 6, 7]),  # three of one beginning
    (
        [4, 2, 6, 3, 2],
        [0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 8, 4, 5, 9, 0, 1],
    ),  # two beginnings in turn, and one sequence that is all beginning
]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("lengths", "places"), BEGINNINGS)
def test_sequences_with_tokens_in_common_attend_as_each_alone(lengths: list[int], places: list[int], window: int | None) -> None:
    generator = torch.Generator().manual_seed(5)
    tokens = max(places) + 1
    inputs = [torch.randn(tokens, heads, 4, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
    weight = torch.randn(tokens, 4, 4, generator=generator, dtype=torch.float64)
    ids = PackedIds(torch.zeros(tokens, dtype=torch.int64), tuple(lengths), np.array(places))
    made = packing(ids, 4, torch.zeros(max(lengths), 2), None, torch.float64)
    assert made.copies is not None
    query, key, value = inputs
    found = of_copies(partial(in_blocks, scale=0.7, window=window), query, key, value, made, made.copies)
    expected = alone([each[torch.tensor(places)] for each in inputs], lengths, window)[
        [places.index(token) for token in range(tokens)]
    ]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = (torch.autograd.grad((each * weight).sum(), inputs) for each in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def alone(inputs: list[Tensor], lengths: list[int], window: int | None) -> Tensor:
    outputs = []
    for query, key, value in zip(*(each.split(lengths) for each in inputs), strict=True):
        q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        places = torch.arange(len(query))
        distance = places[:, None] - places
        is_seen = (distance >= 0) & (distance < (window or len(query)))
        mask = torch.zeros(distance.shape, dtype=query.dtype).masked_fill(~is_seen, -torch.inf)
        attend = torch.nn.functional.scaled_dot_product_attention
        outputs.append(attend(q, k, v, mask, scale=0.7, enable_gqa=True).squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("lengths", "window", "masks"), [([9, 5], 3, {(3, 2), (2, 2)}), ([90, 50], 3, {(3, 2), (2, 2)}), ([90], None, set())]
)
def test_masks_grow_with_the_window_and_all_layers_share_them(
    lengths: list[int], window: int | None, masks: set[tuple[int, ...]]
) -> None:
    """Torch saves a mask for the backward pass: a copy in every block of every layer would take more than all other activations."""
    layout = packed(lengths, features=10**9).layout(window)
    found = [layout.mask(number, torch.float32) for number in range(len(layout.widths))]
    assert {tuple(mask.shape) for mask in found if mask is not None} == masks
    assert all(mask is layout.mask(number, torch.float32) for number, mask in enumerate(found))


def test_masks_of_context_ranks_grow_with_the_length() -> None:
    ids = PackedIds(torch.zeros(120, dtype=torch.int64), (80, 40))
    made = packing(ids, 4, torch.zeros(80, 2), None, torch.float32, cut_sequences(ids.lengths, 0, 2, CPU))
    layouts = [half.layout(None) for half in made.halves]
    assert [layout.widths for layout in layouts] == [(0,), (60,)], "of early and of late queries"
    mask = layouts[1].mask(0, torch.float32)
    assert mask is not None and mask.shape == (2, 1, 1, 60)


@pytest.mark.parametrize("window", [None, 3])
def test_the_mask_of_other_devices_computes_the_same(window: int | None) -> None:
    ids = PackedIds(torch.zeros(24, dtype=torch.int64), (15, 9))
    cut = cut_sequences(ids.lengths, 0, 2, CPU)
    layout = packing(ids, 4, torch.zeros(15, 2), None, torch.float64, cut).halves[-1].layout(window)
    compared = 0
    for number, ((rows, queries), width) in enumerate(zip(layout.blocks.shapes, layout.widths, strict=True)):
        if width:
            shapes = [(rows, 4, queries, 4), *[(rows, 2, keys, 4) for keys in (width, queries, width, queries)]]
            query, key1, key2, value1, value2 = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
            keys, values = (key1, key2), (value1, value2)
            found = merged_attention(query, keys, values, layout.mask(number, query.dtype), 0.7)
            expected = masked_attention(query, keys, values, layout.whole_mask(number, query.dtype), 0.7)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
            compared += 1
    assert compared


def test_positions_start_again_with_each_sequence() -> None:
    ids = PackedIds(torch.zeros(6, dtype=torch.int64), (3, 1, 2))
    angles = torch.tensor([[0.0], [0.1], [0.2], [0.3]])
    made = packing(ids, 4, angles, 2 * angles, torch.float32)
    torch.testing.assert_close(made.full[1].flatten(), torch.tensor([0, 0.1, 0.2, 0, 0, 0.1]).sin())
    torch.testing.assert_close(made.sliding[0].flatten(), torch.tensor([0, 0.2, 0.4, 0, 0, 0.2]).cos())
    assert (made.cu_seqlens_q.tolist(), made.max_seqlen_q, made.ends) == ([0, 3, 4, 6], 3, [3, 4, 6])
    cut = cut_sequences((3, 1, 2), 1, 2, CPU)
    tokens, part = cut.tokens.tolist(), packing(ids, 4, angles, None, torch.float32, cut)
    assert part.full[0].flatten().tolist() == made.full[0].flatten()[tokens].tolist()
    assert part.halves[0].key_ends[-1] == len(cut.halves[0].keys)


def test_a_token_in_common_has_one_position() -> None:
    ids = PackedIds(torch.zeros(4, dtype=torch.int64), (3, 3), np.array([0, 1, 2, 0, 1, 3])).aligned(3)
    made = packing(ids, 4, torch.arange(4.0).unsqueeze(1), None, torch.float64)
    torch.testing.assert_close(
        made.full[0].flatten(), torch.tensor([0, 1, 2, 2, 0, 1], dtype=torch.float64).cos(), rtol=0, atol=1e-6
    )
    assert made.ends == [3, 6, 8]


def test_alignment_adds_a_sequence_at_the_end() -> None:
    ids = PackedIds(torch.arange(1, 6), (2, 3))
    assert ids.aligned(5) is ids
    assert (ids.aligned(4).ids.tolist(), ids.aligned(4).lengths) == ([1, 2, 3, 4, 5, 0, 0, 0], (2, 3, 3))


@pytest.mark.parametrize("window", [None, 3])
def test_torch_takes_the_call_of_its_flash_attention(window: int | None) -> None:
    """The kernel needs CUDA, but the check of its shapes does not. Float32 and unsupported heads run in blocks."""
    with FakeTensorMode():
        query, key, value = (torch.empty(9, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
        assert flash(query, key, value, packed([4, 5], dtype=torch.bfloat16), 0.7, window).shape == query.shape
        few = packed([4, 5], dtype=torch.bfloat16)
        few.cu_seqlens_q, few.max_seqlen_q = few.cu_seqlens_q // 2, 2  # 2 queries of each
        assert flash(query[:4], key, value, few, 0.7, window).shape == (4, 4, 16)
    for width, dtype in ((4, torch.float32), (12, torch.bfloat16), (264, torch.bfloat16)):
        query, key, value = (torch.randn(9, heads, width, dtype=dtype) for heads in (4, 2, 2))
        made = packed([4, 5], dtype=dtype)
        torch.testing.assert_close(flash(query, key, value, made, 0.7, window), in_blocks(query, key, value, made, 0.7, window))


def test_long_sequences_of_one_length_are_padded_for_torchs_attention() -> None:
    query, key, value = (torch.randn(2 * (BATCHED + 1), heads, 8) for heads in (2, 1, 1))
    made = packed([BATCHED + 1] * 2, dtype=torch.float32)
    torch.testing.assert_close(flash(query, key, value, made, 0.7, None), in_blocks(query, key, value, made, 0.7, None))
