"""The state of one layout's ranks is divided again for another layout, tested with tensors only."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from polyreme_trainer.megatron.huggingface.families import find_family
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.rope import Rope
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank, hf_shapes, is_expert, is_expert_bias, param_shapes, rank_slices
from polyreme_trainer.megatron.parallel.reshard import RankMesh, RankState, SavedShard, ShardFiles, reshard

TIED = Architecture(
    family=find_family("qwen2"),
    layers=4,
    hidden=6,
    heads=4,
    kv_heads=2,
    head_dim=2,
    ffn=8,
    vocab=45,
    head="tied",
    norm_eps=1e-6,
    max_position=16,
    rope=Rope(10000.0),
)
EXPERTS = replace(TIED, family=find_family("qwen2_moe"), layers=2, experts=4, expert_ffn=4, shared_ffn=6, top_k=2)
BIASED = replace(
    TIED, family=find_family("glm4_moe"), experts=4, dense_layers=1, expert_ffn=4, shared_ffn=6, top_k=2
)  # its first layer has no experts
EXPERT_LAYOUTS = [RankMesh(1, 1, 1), RankMesh(1, 1, 2, 2), RankMesh(1, 1, 4, 2), RankMesh(2, 2, 3), RankMesh(2, 2, 4, 4)]
EXPERT_LAYOUTS += [
    RankMesh(2, 1, 1, expert_tensor=1),
    RankMesh(2, 1, 2, 2, expert_tensor=1),
    RankMesh(1, 2, 4, 2, expert_tensor=2),
]
UNTIED, CRITIC = replace(TIED, head="untied"), replace(TIED, head="value")
VIRTUAL = RankMesh(1, 2, 1, virtual_pipeline=2)
LAYOUTS = [RankMesh(1, 1, 1), RankMesh(2, 1, 1), RankMesh(1, 1, 2), RankMesh(1, 2, 1), VIRTUAL, RankMesh(2, 2, 3)]


def whole_model(arch: Architecture) -> dict[str, Tensor]:
    """A different number in every element of every Hugging Face tensor, from 1 on."""
    tensors, start = {}, 1
    for name, shape in hf_shapes(arch).items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + count, dtype=torch.float64).view(shape)
        start += count
    return tensors


def params(arch: Architecture, rank: Rank) -> dict[str, Tensor]:
    """The parameters of one rank; padding is zero."""
    tensors = whole_model(arch)
    found = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in param_shapes(arch, rank).items()}
    for piece in rank_slices(arch, rank):
        found[piece.param][piece.param_index] = tensors[piece.hf_name][piece.hf_index]
    return found


def saved(arch: Architecture, layout: RankMesh) -> dict[int, RankState]:
    """The state of every rank by number: ranks with the same parameters have equally many elements, wherever a parameter begins."""
    states: dict[int, RankState] = {}
    each = layout.tensor * layout.data
    for number in range(layout.ranks):
        rank, place = replace(layout.shards[0], pp_rank=number // each).at(number % each), number % each
        shard = params(arch, rank)
        same = each // rank.expert_places
        experts = divide({name: param for name, param in shard.items() if is_expert(name)}, place // rank.expert_places, same)
        others = divide({name: param for name, param in shard.items() if not is_expert(name)}, place // rank.tp, layout.data)
        states[number] = {"moment": experts | others}
    return states


def divide(shard: dict[str, Tensor], number: int, parts: int) -> dict[str, tuple[int, Tensor]]:
    """One of `parts` shares with equal numbers of consecutive elements of the parameters."""
    total = sum(param.numel() for param in shard.values())
    low, high = total * number // parts, total * (number + 1) // parts
    state, at = {}, 0
    for name, param in shard.items():
        start, stop = max(low - at, 0), min(high - at, param.numel())
        if start < stop:
            state[name] = start, param.flatten()[start:stop]
        at += param.numel()
    return state


@pytest.mark.parametrize("arch", [TIED, UNTIED, CRITIC], ids=["tied", "untied", "critic"])
@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_every_rank_gets_its_parameters_from_the_ranks_of_any_layout(
    arch: Architecture, before: RankMesh, after: RankMesh
) -> None:
    states = saved(arch, before)
    assert sorted(states) == list(range(before.tensor * before.pipeline * before.data))
    check_resharded(arch, before, after, states)


@pytest.mark.parametrize("before", EXPERT_LAYOUTS)
@pytest.mark.parametrize("after", EXPERT_LAYOUTS)
def test_experts_pass_from_layout_to_layout(before: RankMesh, after: RankMesh) -> None:
    check_resharded(EXPERTS, before, after, saved(EXPERTS, before))


@pytest.mark.parametrize("layout", [RankMesh(1, 1, 1), RankMesh(2, 1, 2, 2), RankMesh(1, 2, 2)])
def test_expert_biases_keep_their_dtype_and_only_layers_with_experts_have_them(layout: RankMesh) -> None:
    states = {
        number: {
            "moment": {
                name: (at, part if is_expert_bias(name) else part.bfloat16()) for name, (at, part) in state["moment"].items()
            }
        }
        for number, state in saved(BIASED, RankMesh(1, 2, 1)).items()
    }
    for here in layout.shards:
        shards = [SavedShard(BIASED, files, states) for files in RankMesh(1, 2, 1).files(here)]
        expected = params(BIASED, here)
        found = reshard(BIASED, "moment", expected, here, shards)
        biases = {name for name in found if is_expert_bias(name)}
        assert len(biases) == (3 if here.pp == 1 else 1 + here.pp_rank)
        assert all(found[name].dtype == torch.float32 and torch.equal(found[name], expected[name].float()) for name in biases)
        assert all(torch.equal(found[name], expected[name].bfloat16()) for name in found.keys() - biases)


def check_resharded(arch: Architecture, before: RankMesh, after: RankMesh, states: dict[int, RankState]) -> None:
    """The ranks of `after` find their parameters in the states of those of `before`."""
    for here in after.shards:
        shards = [SavedShard(arch, files, states) for files in before.files(here)]
        expected = params(arch, here)
        found = reshard(arch, "moment", expected, here, shards)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_only_the_parameters_that_are_asked_for_are_read() -> None:
    """A data rank may update only some parameters, and a model may have frozen ones."""
    layout, here = RankMesh(2, 1, 1), Rank()
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    states = {number: {"moment": {name: state["moment"][name]}} for number, state in saved(TIED, layout).items()}
    shards = [SavedShard(TIED, files, states) for files in layout.files(here)]
    found = reshard(TIED, "moment", [name], here, shards)
    assert found.keys() == {name}
    assert torch.equal(found[name], params(TIED, here)[name])


def test_ranks_of_the_same_shards_read_no_others() -> None:
    assert RankMesh(2, 1, 2).files(Rank(1, 2)) == [ShardFiles(Rank(1, 2), [1, 3], [1, 3])]
    assert [files.rank for files in RankMesh(2, 1, 2).files(Rank())] == [Rank(0, 2), Rank(1, 2)]
    assert len(RankMesh(1, 2, 1).files(Rank(pp=2, vpp=2))) == 2
    second = Rank(ep_rank=1, ep=2)
    assert RankMesh(1, 1, 4, 2).files(second) == [ShardFiles(second, [0, 1, 2, 3], [1, 3])]
    whole = Rank(1, 2, etp=1)  # tensor ranks that have the same experts, whole
    assert RankMesh(2, 1, 2, expert_tensor=1).files(whole) == [ShardFiles(whole, [1, 3], [0, 1, 2, 3])]


def test_data_ranks_that_do_not_fill_a_parameter_are_an_error() -> None:
    states = saved(TIED, RankMesh(1, 1, 2))
    shard = SavedShard(TIED, ShardFiles(Rank(), [0, 1], [0, 1]), {0: states[0], 1: {"moment": {}}})
    with pytest.raises(RuntimeError, match="shape"):
        for name in params(TIED, Rank()):
            if name in states[0]["moment"]:
                shard.param("moment", name)
