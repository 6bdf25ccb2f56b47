"""Every family through Megatron's files and back, in several layouts: the tensors have the bits that they had."""

import itertools
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyreme_trainer.convert import hf_directory
from polyreme_trainer.convert.command import CheckpointFormat, Layers, convert
from polyreme_trainer.convert.layout import FILE, TRACKER
from polyreme_trainer.megatron.huggingface.families import find_family, known_families
from polyreme_trainer.megatron.huggingface.hf_files import EXPERT_BIASES
from support.models import tiny_family_model

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}


def model_of(family: str, path: Path, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> Path:
    """A tiny model whose weights have every kind of bits, including NaN and minus zero."""
    experts = EXPERTS if find_family(family).expert else {}
    tiny_family_model(family, path, **experts | {"num_hidden_layers": 4, "layer_types": None} | fields)
    tensors = load_file(path / "model.safetensors")
    tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items() if not name.endswith(EXPERT_BIASES)}
    first = next(iter(tensors.values()))
    first.view(-1)[:2] = torch.tensor([float("nan"), -0.0])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "tokenizer.json").write_text("{}")
    return path


def bits(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


def weights(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rank_file(directory: Path, rank: str) -> dict[str, Any]:
    return torch.load(directory / "iter_0000001" / rank / FILE, weights_only=False)


DENSE: list[dict[str, int]] = [{}, {"tensor": 4, "pipeline": 2}, {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2}]
WITH_EXPERTS: list[dict[str, int]] = [
    {"tensor": 2, "pipeline": 2, "expert": 2},
    {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "expert": 4, "expert_tensor": 1},
    {"tensor": 4, "expert": 1, "expert_tensor": 2},
]


def ranks(tensor: int = 1, pipeline: int = 1, expert: int = 1, expert_tensor: int = 0, **_: int) -> int:
    """The number of ranks without copies."""
    return pipeline * max(tensor, expert * (expert_tensor or tensor))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Path]:
    """Models of each family with tied and untied embeddings. Tests only read them."""
    folder = tmp_path_factory.mktemp("models")
    return cache(lambda family, tied: model_of(family, folder / f"{family}-{tied}", tie_word_embeddings=tied))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "layout"),
    [(name, layout) for name in known_families() for layout in DENSE + (WITH_EXPERTS if find_family(name).expert else [])],
)
def test_a_model_comes_back_bit_for_bit(
    models: Callable[[str, bool], Path], family: str, tied: bool, layout: dict[str, int], tmp_path: Path
) -> None:
    if find_family(family).projection_norms and "tensor" in layout:
        layout = layout | {"tensor": 2}  # a norm over all of the model's two key-value heads divides as they do
    model = models(family, tied)
    convert(model, tmp_path / "megatron", vocab_multiple=layout.get("tensor", 1), **layout)  # type: ignore[arg-type]
    assert len(list((tmp_path / "megatron").glob("iter_0000001/mp_rank_*"))) == ranks(**layout)
    convert(tmp_path / "megatron", tmp_path / "back", config=model, **layout)  # type: ignore[arg-type]
    assert bits(weights(tmp_path / "back")) == bits(weights(model))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "back" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("family", known_families())
@pytest.mark.parametrize(("tied", "layers"), [(True, Layers.transformer_engine), (False, Layers.local)])
def test_a_model_comes_back_from_torch_dist(family: str, tied: bool, layers: Layers, tmp_path: Path) -> None:
    model = model_of(family, tmp_path / "model", tie_word_embeddings=tied)
    convert(model, tmp_path / "megatron", file_format=CheckpointFormat.torch_dist, layers=layers)
    convert(tmp_path / "megatron", tmp_path / "back", config=model)
    assert bits(weights(tmp_path / "back")) == bits(weights(model))


@pytest.mark.parametrize("family", [name for name in known_families() if not find_family(name).expert])
def test_the_names_of_transformer_engine_come_back_too(family: str, tmp_path: Path) -> None:
    model = model_of(family, tmp_path / "model")
    convert(model, tmp_path / "megatron", pipeline=2, virtual_pipeline=2, layers=Layers.transformer_engine)
    names = rank_file(tmp_path / "megatron", "mp_rank_00_001")["model1"].keys()
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    assert not any("input_layernorm" in name or "pre_mlp_layernorm" in name for name in names)
    convert(tmp_path / "megatron", tmp_path / "back", config=model)
    assert bits(weights(tmp_path / "back")) == bits(weights(model))


@pytest.mark.parametrize(
    ("family", "layout"),
    [(name, layout) for name in known_families() if find_family(name).expert for layout in [{}, *WITH_EXPERTS]],
)
def test_experts_in_two_matrices_come_back_too(
    models: Callable[[str, bool], Path], family: str, layout: dict[str, int], tmp_path: Path
) -> None:
    layout = layout | ({"tensor": 2} if find_family(family).projection_norms and "tensor" in layout else {})
    model = models(family, False)
    convert(model, tmp_path / "megatron", layers=Layers.grouped, **layout)  # type: ignore[arg-type]
    files = (tmp_path / "megatron" / "iter_0000001").glob(f"mp_rank_*/{FILE}")
    contents = [torch.load(file, weights_only=False) for file in files]
    names = {name for content in contents for key in content.keys() & {"model", "model0", "model1"} for name in content[key]}
    assert {f"experts.weight{number}" for number in (1, 2)} <= {name.partition(".mlp.")[2] for name in names}
    assert not any("local_experts" in name for name in names)
    convert(tmp_path / "megatron", tmp_path / "back", config=model)
    assert bits(weights(tmp_path / "back")) == bits(weights(model))


def test_the_two_matrices_have_the_experts_transposed_and_in_order(tmp_path: Path) -> None:
    """megatron-core reads `weight1` as [experts, hidden, gate and up] and `weight2` as [experts, ffn, hidden]."""
    model = model_of("qwen3_moe", tmp_path / "model")
    convert(model, tmp_path / "megatron", tensor=2, expert=2, layers=Layers.grouped)
    hf = weights(model)
    for tensor, expert in itertools.product((0, 1), (0, 1)):
        state = rank_file(tmp_path / "megatron", f"mp_rank_{tensor:02d}_{expert:03d}")["model"]
        up, down = (state[f"decoder.layers.1.mlp.experts.weight{number}"] for number in (1, 2))
        assert (up.shape, down.shape) == ((32, 2 * 24), (2 * 12, 32))
        for local in (0, 1):
            names = [f"model.layers.1.mlp.experts.{2 * expert + local}.{name}_proj.weight" for name in ("gate", "up", "down")]
            gate, rows, columns = (hf[name].chunk(2, dim=int("down" in name))[tensor] for name in names)
            assert torch.equal(up.view(2, 32, 24)[local].T, torch.cat([gate, rows]))
            assert torch.equal(down.view(2, 12, 32)[local].T, columns)


def test_the_files_are_those_of_megatron(tmp_path: Path) -> None:
    model = model_of("qwen2", tmp_path / "model", torch.float32, tie_word_embeddings=True)
    convert(model, tmp_path / "megatron", tensor=2, pipeline=2)
    hf = weights(model)
    assert (tmp_path / "megatron" / TRACKER).read_text() == "1"
    ranks = sorted(path.name for path in (tmp_path / "megatron" / "iter_0000001").iterdir())
    assert ranks == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    first, last = (rank_file(tmp_path / "megatron", f"mp_rank_01_00{stage}") for stage in (0, 1))
    assert (first["checkpoint_version"], first["iteration"]) == (3.0, 1)
    assert (first["args"].num_layers, first["args"].padded_vocab_size, first["args"].tensor_model_parallel_size) == (4, 256, 2)
    down = hf["model.layers.2.mlp.down_proj.weight"]
    layers = {int(name.split(".")[2]) for name in last["model"] if ".layers." in name}
    assert layers == {0, 1}, "layers are numbered within their stage"
    assert torch.equal(last["model"]["decoder.layers.0.mlp.linear_fc2.weight"], down[:, down.shape[1] // 2 :])
    copy = rank_file(tmp_path / "megatron", "mp_rank_00_001")["model"]["output_layer.weight"]
    assert torch.equal(copy[:45].nan_to_num(), hf["model.embed_tokens.weight"].nan_to_num())
    assert not copy[45:].any(), "padding is zero"
    assert "embedding.word_embeddings.weight" not in last["model"]


def test_a_checkpoint_may_have_the_config_of_its_model_with_it(models: Callable[[str, bool], Path], tmp_path: Path) -> None:
    model = models("llama", False)
    convert(model, tmp_path / "megatron", tensor=2)
    shutil.copy(model / "config.json", tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back")
    assert bits(weights(tmp_path / "back")) == bits(weights(model))
    assert {path.name for path in (tmp_path / "back").iterdir()} == {"config.json", "model.safetensors"}


def test_a_file_has_an_entry_for_each_virtual_stage(tmp_path: Path) -> None:
    """Virtual stages take turns with the layers, as in megatron-core: the first stage of two has layers 0, 1, 4 and 5 of 8."""
    model = model_of("qwen3", tmp_path / "model", torch.float32, tie_word_embeddings=True, num_hidden_layers=8)
    convert(model, tmp_path / "megatron", pipeline=2, virtual_pipeline=2)
    hf = weights(model)
    files = [rank_file(tmp_path / "megatron", f"mp_rank_00_00{stage}") for stage in (0, 1)]
    for stage, first in ((0, 0), (1, 2)):
        assert "model" not in files[stage] and "model2" not in files[stage]
        arguments = files[stage]["args"]
        assert (arguments.virtual_pipeline_model_parallel_size, arguments.num_layers_per_virtual_pipeline_stage) == (2, 2)
        for entry, layer in (("model0", first), ("model1", first + 4)):
            norms = [files[stage][entry][f"decoder.layers.{local}.input_layernorm.weight"] for local in (0, 1)]
            assert torch.equal(norms[0], hf[f"model.layers.{layer}.input_layernorm.weight"])
            assert torch.equal(norms[1], hf[f"model.layers.{layer + 1}.input_layernorm.weight"])
            assert "decoder.layers.2.input_layernorm.weight" not in files[stage][entry]
    others = {
        (stage, entry, name)
        for stage, entry in itertools.product((0, 1), ("model0", "model1"))
        for name in files[stage][entry]
        if ".layers." not in name
    }
    assert others == {
        (0, "model0", "embedding.word_embeddings.weight"),
        (1, "model1", "decoder.final_layernorm.weight"),
        (1, "model1", "output_layer.weight"),
    }


def test_mtp_layers_are_not_converted_and_config_json_says_so(tmp_path: Path) -> None:
    model = model_of("glm4_moe", tmp_path / "model", num_nextn_predict_layers=1)
    expected = weights(model)
    extra = {name.replace("layers.3.", "layers.4."): each.clone() for name, each in expected.items() if ".layers.3." in name}
    save_file(expected | extra, model / "model.safetensors", metadata={"format": "pt"})
    convert(model, tmp_path / "megatron", pipeline=2)
    state = rank_file(tmp_path / "megatron", "mp_rank_00_001")["model"]
    assert state["decoder.layers.1.mlp.router.expert_bias"].equal(expected["model.layers.3.mlp.gate.e_score_correction_bias"])
    assert "mlp.router.expert_bias" not in "".join(
        name for name in rank_file(tmp_path / "megatron", "mp_rank_00_000")["model"] if ".layers.0." in name
    )
    convert(tmp_path / "megatron", tmp_path / "back", config=model)
    assert bits(weights(tmp_path / "back")) == bits(expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert json.loads((model / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_ranks_that_cut_experts_have_files_as_in_megatron(tmp_path: Path) -> None:
    """Two tensor ranks have different whole experts: the ranks of megatron-core's default order are (tensor 0, expert 0) and (1, 1)."""
    model = model_of("qwen3_moe", tmp_path / "model")
    convert(model, tmp_path / "megatron", tensor=2, expert=2, expert_tensor=1)
    assert {path.name for path in (tmp_path / "megatron" / "iter_0000001").iterdir()} == {"mp_rank_00_000", "mp_rank_01_001"}
    hf = weights(model)
    for number in (0, 1):
        state = rank_file(tmp_path / "megatron", f"mp_rank_0{number}_00{number}")["model"]
        down = hf[f"model.layers.0.mlp.experts.{2 * number}.down_proj.weight"]
        assert torch.equal(state["decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight"], down)
        proj = hf["model.layers.0.self_attn.o_proj.weight"].chunk(2, dim=1)[number]
        assert torch.equal(state["decoder.layers.0.self_attention.linear_proj.weight"], proj)


@pytest.mark.parametrize(("tensor", "virtual"), [(1, 2), (2, 1)])
def test_a_critic_has_its_head_cut_over_the_tensor_ranks(tensor: int, virtual: int, tmp_path: Path) -> None:
    model = model_of("qwen2", tmp_path / "model", tie_word_embeddings=False)
    tensors = weights(model)
    del tensors["lm_head.weight"]
    tensors["score.weight"] = torch.randn(1, 32).to(torch.bfloat16)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    convert(model, tmp_path / "megatron", tensor=tensor, pipeline=2, virtual_pipeline=virtual, orm=True)
    last = f"model{virtual - 1}" if virtual > 1 else "model"
    files = [rank_file(tmp_path / "megatron", f"mp_rank_{rank:02d}_001")[last] for rank in range(tensor)]
    assert torch.equal(torch.cat([file["rm_head.weight"] for file in files], dim=1), tensors["score.weight"])
    assert all(not file["rm_head.bias"].any() and "output_layer.weight" not in file for file in files)
    convert(tmp_path / "megatron", tmp_path / "back", config=model, orm=True)
    assert bits(weights(tmp_path / "back")) == bits(tensors)
    fields = json.loads((tmp_path / "back" / "config.json").read_text())
    assert fields["architectures"] == ["Qwen2ForSequenceClassification"] and len(fields["id2label"]) == 1


@pytest.mark.parametrize("family", [name for name in known_families() if find_family(name).classifier])
def test_a_critic_of_every_family_comes_back_bit_for_bit(
    models: Callable[[str, bool], Path], family: str, tmp_path: Path
) -> None:
    """The last layout is the most mixed one of the family: its head is on the last stage, beside experts that other ranks cut."""
    tensors = {name: tensor for name, tensor in weights(models(family, True)).items() if name != "lm_head.weight"}
    tensors["score.weight"] = torch.randn(1, 32).to(torch.bfloat16)
    model = tmp_path / "model"
    shutil.copytree(models(family, True), model)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    for number, layout in enumerate([DENSE[1], WITH_EXPERTS[1] if find_family(family).expert else DENSE[2]]):
        convert(model, tmp_path / f"megatron-{number}", orm=True, **layout)  # type: ignore[arg-type]
        convert(tmp_path / f"megatron-{number}", tmp_path / f"back-{number}", config=model, orm=True)
        assert bits(weights(tmp_path / f"back-{number}")) == bits(tensors)


def test_large_models_are_written_in_several_files(tmp_path: Path) -> None:
    model = model_of("llama", tmp_path / "model")
    tensors = weights(model)
    (target := tmp_path / "target").mkdir()
    hf_directory.write(target, tensors, model, critic=False, shard_bytes=5000)
    index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(tensors) and len(set(index.values())) > 2
    assert all(name in load_file(target / index[name]) for name in tensors)
    convert(target, tmp_path / "megatron")
    convert(tmp_path / "megatron", tmp_path / "back", config=target)
    assert bits(weights(tmp_path / "back")) == bits(tensors)
