"""The mapping table, tested with numpy: round trips, complete coverage without overlap, and megatron-core's order of rows."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families import find_family, known_families
from polyreme_trainer.megatron.huggingface.families.base import EMBEDDING, LM_HEAD, Architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.huggingface.families.rope import Rope
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    groups = draw(st.sampled_from([1, 2, 3, 4]))
    heads = groups * draw(st.sampled_from([1, 2, 4]))
    family = find_family(draw(st.sampled_from(known_families())))
    family = family.with_biases(HfConfig(dict.fromkeys(family.biases, draw(st.booleans()))))
    return Architecture(
        family=family,
        experts=draw(st.sampled_from([2, 4])) if family.expert else 0,
        expert_ffn=8,
        shared_ffn=draw(st.sampled_from([8, 24])),
        layers=draw(st.sampled_from([2, 4])),
        hidden=draw(st.sampled_from([4, 6])),
        heads=heads,
        kv_heads=groups,
        head_dim=draw(st.sampled_from([2, 4])),
        ffn=draw(st.sampled_from([8, 24])),
        vocab=draw(st.integers(1, 150)),
        head=draw(st.sampled_from(["tied", "untied", "value"])),
        norm_eps=1e-6,
        max_position=16,
        rope=Rope(10000.0),
    )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Architecture, int, int]:
    arch = draw(architectures())
    fitting = [tp for tp in (1, 2, 3, 4, 8) if not _does_not_divide(arch, tp)]
    return arch, draw(st.sampled_from(fitting)), draw(st.sampled_from([1, 2]))


def virtual_stages(arch: Architecture, pp: int) -> int:
    """The numbers of virtual stages per stage for which the model has enough layers."""
    return 2 if pp == 2 and arch.layers == 4 else 1


def _does_not_divide(arch: Architecture, tp: int) -> bool:
    try:
        hf_mapping.check(arch, tp)
    except ValueError:
        return True
    return False


def ranks(tp: int, pp: int, ep: int = 1, vpp: int = 1) -> list[Rank]:
    return [Rank(t, tp, p, pp, e, ep, vpp=vpp) for e in range(ep) for p in range(pp) for t in range(tp)]


def numbered(arch: Architecture) -> dict[str, np.ndarray]:
    """Every element of every tensor a different number."""
    tensors, start = {}, 1
    for name, shape in hf_mapping.hf_shapes(arch).items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(start, start + size, dtype=np.int64).reshape(shape)
        start += size
    return tensors


def load(arch: Architecture, rank: Rank, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    params = {name: np.zeros(shape, dtype=np.int64) for name, shape in hf_mapping.param_shapes(arch, rank).items()}
    for piece in hf_mapping.rank_slices(arch, rank):
        params[piece.param][piece.param_index] = tensors[piece.hf_name][piece.hf_index]
    return params


@given(layouts(), st.sampled_from([0, 1, 2, 4]))
def test_load_then_export_is_the_identity_and_writes_every_element_once(case: tuple[Architecture, int, int], etp: int) -> None:
    arch, tp, pp = case
    tensors = numbered(arch)
    back = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    times = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    ep = 2 if arch.experts else 1
    every = ranks(tp, pp, ep, virtual_stages(arch, pp))
    if arch.experts and etp and (tp % (ep * etp) == 0 or ep * etp % tp == 0):  # another number of ranks cuts the experts
        stages = ranks(1, pp, vpp=virtual_stages(arch, pp))
        first = replace(stages[0], tp=tp, ep=ep, etp=etp)
        every = [replace(first, pp_rank=stage.pp_rank).at(place) for stage in stages for place in range(first.places)]
    for rank in every:
        params = load(arch, rank, tensors)
        for piece in hf_mapping.rank_slices(arch, rank):
            if piece.primary:
                back[piece.hf_name][piece.hf_index] = params[piece.param][piece.param_index]
                times[piece.hf_name][piece.hf_index] += 1
    for name, tensor in tensors.items():
        assert np.array_equal(back[name], tensor), name
        assert (times[name] == 1).all(), name
    assert hf_mapping.stage_of_tensors(arch, Rank(0, tp, 0, pp, 0, ep)).keys() == tensors.keys()


def test_virtual_stages_take_turns() -> None:
    arch = _small(layers=8)
    assert [hf_mapping.layers_of(arch, Rank(pp_rank=stage, pp=2)) for stage in (0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [hf_mapping.layers_of(arch, Rank(pp_rank=stage, pp=2, vpp=2)) for stage in (0, 1)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [hf_mapping.layers_of(arch, Rank(pp_rank=stage, pp=2, vpp=4)) for stage in (0, 1)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    with pytest.raises(ValueError, match="2 pipeline stages of 3 virtual stages each"):
        hf_mapping.layers_of(arch, Rank(pp=2, vpp=3))


@given(layouts())
def test_slices_fill_every_parameter_but_the_padding(case: tuple[Architecture, int, int]) -> None:
    arch, tp, pp = case
    for rank in ranks(tp, pp, vpp=virtual_stages(arch, pp)):
        for name, param in load(arch, rank, numbered(arch)).items():
            if name == "embedding.word_embeddings.weight" or (name == "output_layer.weight" and arch.head != "value"):
                real = np.clip(arch.vocab - rank.tp_rank * len(param), 0, len(param))
                assert (param[:real] > 0).all() and (param[real:] == 0).all()
            else:
                assert (param > 0).all(), name


@given(layouts())
def test_tensor_shards_concatenate_to_the_single_rank_parameter(case: tuple[Architecture, int, int]) -> None:
    arch, tp, _ = case
    tensors = numbered(arch)
    whole = load(arch, Rank(), tensors)
    shards = [load(arch, rank, tensors) for rank in ranks(tp, 1)]
    for name, expected in whole.items():
        parts = [shard[name] for shard in shards]
        is_whole = len(parts[-1]) == len(expected)  # except for a norm over the whole projection
        whole_bias = name.endswith(("linear_proj.bias", "linear_fc2.bias"))
        if ("layernorm" in name and is_whole) or "router" in name or len(expected) == 1 or whole_bias:  # 1: the value head
            joined = parts[-1]
        elif "linear_fc1" in name:  # gate and up are interleaved by rank
            halves = [np.split(part, 2) for part in parts]
            joined = np.concatenate([half[0] for half in halves] + [half[1] for half in halves])
        elif "linear_proj" in name or "linear_fc2" in name:
            joined = np.concatenate(parts, axis=1)
        elif "linear_qkv" in name or "layernorm" in name:
            joined = np.concatenate(parts)
        else:
            joined, expected = np.concatenate(parts)[: arch.vocab], expected[: arch.vocab]
        assert np.array_equal(joined, expected), name


def test_packed_rows_are_query_heads_then_key_then_value_of_each_group() -> None:
    arch = _small(heads=4, kv_heads=2, head_dim=2)
    tensors = numbered(arch)
    q, k, v = (tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv")
    packed = load(arch, Rank(), tensors)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert np.array_equal(packed, np.concatenate([q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]]))


def test_more_ranks_than_groups_cut_inside_a_group() -> None:
    arch = _small(heads=4, kv_heads=2, head_dim=2)
    tensors = numbered(arch)
    packed = load(arch, Rank(), tensors)["decoder.layers.0.self_attention.linear_qkv.weight"]
    for tp_rank in range(4):
        shard = load(arch, Rank(tp_rank, 4), tensors)["decoder.layers.0.self_attention.linear_qkv.weight"]
        assert np.array_equal(shard, packed[tp_rank * 4 : tp_rank * 4 + 4])


def test_a_tied_last_stage_reads_the_embedding_and_does_not_write_it() -> None:
    arch = _small(head="tied")
    pieces = [piece for piece in hf_mapping.rank_slices(arch, Rank(0, 1, 1, 2)) if piece.param == "output_layer.weight"]
    assert [(piece.hf_name, piece.primary) for piece in pieces] == [(EMBEDDING, False)]
    assert hf_mapping.hf_aliases(arch) == {LM_HEAD: EMBEDDING}
    assert LM_HEAD not in hf_mapping.hf_shapes(arch)


@pytest.mark.parametrize(("tp", "pp"), [(3, 1), (8, 1), (1, 3)])
def test_sizes_that_do_not_divide_are_refused(tp: int, pp: int) -> None:
    with pytest.raises(ValueError, match="divide"):
        hf_mapping.rank_slices(_small(), Rank(0, tp, 0, pp))


def test_parameters_counts_every_weight_once() -> None:
    layer = 4 * 8 + 2 * (4 * 4) + 8 * 4 + 3 * 8 * 4 + 2 * 4
    assert _small(head="tied").parameters == 33 * 4 + 2 * layer + 4
    assert _small(head="untied").parameters == 2 * 33 * 4 + 2 * layer + 4
    assert _small(head="value").parameters == 33 * 4 + 2 * layer + 4 + 4


def test_the_table_needs_neither_torch_nor_megatron() -> None:
    code = "import sys, polyreme_trainer.megatron.huggingface.hf_mapping as _; print([m for m in ('torch', 'megatron', 'transformers') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout.strip() == "[]"


def _small(**changes: object) -> Architecture:
    fields = {
        "family": find_family("llama"),
        "layers": 2,
        "hidden": 4,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 2,
        "ffn": 8,
        "vocab": 33,
    }
    fields |= {"head": "untied", "norm_eps": 1e-6, "max_position": 16, "rope": Rope(10000.0)}
    return Architecture(**(fields | changes))  # type: ignore[arg-type]


def test_each_expert_rank_has_its_own_experts_and_all_else() -> None:
    arch = replace(_small(heads=4, kv_heads=2, head_dim=2), family=find_family("mixtral"), experts=4, expert_ffn=8)
    tensors = numbered(arch)
    for ep_rank in (0, 1):
        rank = Rank(ep_rank=ep_rank, ep=2)
        params = load(arch, rank, tensors)
        for local in (0, 1):
            down = tensors[f"model.layers.1.block_sparse_moe.experts.{2 * ep_rank + local}.w2.weight"]
            assert np.array_equal(params[f"decoder.layers.1.mlp.experts.local_experts.{local}.linear_fc2.weight"], down)
        assert "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight" not in params
        assert np.array_equal(
            params["decoder.layers.0.mlp.router.weight"], tensors["model.layers.0.block_sparse_moe.gate.weight"]
        )
        written = {piece.hf_name for piece in hf_mapping.rank_slices(arch, rank) if piece.primary}
        assert (EMBEDDING in written) is (ep_rank == 0)
        assert f"model.layers.0.block_sparse_moe.experts.{2 * ep_rank}.w1.weight" in written
    with pytest.raises(ValueError, match="experts"):
        hf_mapping.rank_slices(arch, Rank(ep=3))
