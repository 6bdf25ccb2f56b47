"""The table of adapters: published numbers of parameters, and a partition of every tensor over any ranks."""

import math
from dataclasses import replace
from itertools import product

import pytest

from polyreme.config.trainer import LoraConfig
from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.huggingface.hf_mapping import Rank, Slice, hf_shapes, param_shapes, rank_slices
from polyreme_trainer.megatron.huggingface.lora_mapping import adapter_architecture, targets
from support.published import CONFIGS


def architecture(name: str) -> Architecture:
    return read_architecture(HfConfig(CONFIGS[name], name))


def test_rank_16_on_every_layer_of_qwen_7b_has_the_parameters_that_peft_prints() -> None:
    adapter = adapter_architecture(architecture("Qwen2.5-7B-Instruct"), LoraConfig(rank=16))
    assert adapter.parameters == 40_370_176
    assert sum(math.prod(shape) for shape in param_shapes(replace(adapter, layers=1), Rank()).values()) == 40_370_176 // 28


def test_a_model_with_experts_has_adapters_on_attention_only() -> None:
    arch = architecture("Qwen3-235B-A22B")
    assert targets(arch, LoraConfig()) == ("q_proj", "k_proj", "v_proj", "o_proj")
    with pytest.raises(ConfigError) as error:
        adapter_architecture(arch, LoraConfig(targets=["q_proj", "up_proj"]))
    assert error.value.found == "up_proj"


def rows_of(piece: Slice) -> tuple[int, ...]:
    """A slice's first and last row, in the parameter and in the tensor."""
    return piece.param_index[0].start, piece.param_index[0].stop, piece.hf_index[0].start, piece.hf_index[0].stop


@pytest.mark.parametrize("some", [None, ["k_proj"], ["v_proj", "q_proj", "gate_proj", "down_proj"]])
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2), (4, 1)])
def test_the_ranks_cover_every_tensor_once_beside_the_rows_of_their_weights(
    some: list[str] | None, tensor: int, pipeline: int
) -> None:
    """With 4 tensor ranks and 2 groups, a rank's rows start and end inside a group."""
    arch = replace(architecture("Qwen2.5-0.5B-Instruct"), layers=2, heads=8, kv_heads=2, head_dim=4, hidden=12, ffn=16)
    lora = LoraConfig.model_validate({"rank": 3, "targets": some})
    adapter = adapter_architecture(arch, lora)
    assert {name.split(".")[4] for name in hf_shapes(adapter)} == set(targets(arch, lora))
    covered = dict.fromkeys(hf_shapes(adapter), 0)
    for tp_rank, pp_rank in product(range(tensor), range(pipeline)):
        rank = Rank(tp_rank, tensor, pp_rank, pipeline)
        weights = {(piece.hf_name, *rows_of(piece)) for piece in rank_slices(arch, rank)}
        shapes = param_shapes(adapter, rank)
        for piece in rank_slices(adapter, rank):
            cells = [part.stop - part.start for part in piece.hf_index]
            covered[piece.hf_name] += piece.primary * math.prod(cells)
            assert all(part.stop <= size for part, size in zip(piece.param_index, shapes[piece.param], strict=True))
            if piece.param.endswith("lora_b") and "o_proj" not in piece.hf_name and "down" not in piece.hf_name:
                assert (piece.hf_name.replace("lora_B.weight", "weight"), *rows_of(piece)) in weights
    assert covered == {name: math.prod(shape) for name, shape in hf_shapes(adapter).items()}


def test_a_critics_value_head_is_trained_with_its_adapters() -> None:
    arch = replace(architecture("Qwen2.5-0.5B-Instruct"), head="value", layers=2)
    adapter = adapter_architecture(arch, LoraConfig(targets=["q_proj"]))
    assert hf_shapes(adapter)["score.weight"] == (1, arch.hidden)
    assert len(hf_shapes(adapter)) == 2 * 2 + 1
    last = Rank(pp_rank=1, pp=2)
    assert [piece.param for piece in rank_slices(adapter, last)][-1] == "output_layer.weight"
    assert "output_layer.weight" not in param_shapes(adapter, replace(last, pp_rank=0))
