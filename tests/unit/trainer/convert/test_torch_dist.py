"""Checkpoints in the format torch_dist: pieces of several writers, layers and experts stacked, and what is damaged."""

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from polyreme.errors import ConfigError
from polyreme_trainer.convert.command import CheckpointFormat, Layers, convert
from support.models import tiny_family_model


def stacked(megatron: Path) -> dict[str, Tensor]:
    """The parameters of a checkpoint of one rank, as torch_dist keeps them: the layers of a parameter in one tensor, and its experts."""
    state: dict[str, Tensor] = torch.load(megatron / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)[
        "model"
    ]
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        parts = name.split(".")
        places = [int(part) for part in parts if part.isdecimal()]
        key = ".".join(part for part in parts if not part.isdecimal()).replace("local_experts", "experts")
        found.setdefault(key, {})[tuple(places)] = tensor
    return {key: _stack(tensors) for key, tensors in found.items()}


def _stack(tensors: dict[tuple[int, ...], Tensor]) -> Tensor:
    if () in tensors:
        return tensors[()]
    first = sorted({place[0] for place in tensors})
    return torch.stack([_stack({place[1:]: t for place, t in tensors.items() if place[0] == number}) for number in first])


def save(state: dict[str, Any], folder: Path) -> None:
    """Beside what a run leaves there of its optimizer."""
    extra = {"optimizer.state.exp_avg.output_layer.weight": torch.ones(3), "rng_state/shard_0_1": torch.ones(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is one process
        save_distributed(state | extra, storage_writer=FileSystemWriter(folder), no_dist=True)


@pytest.fixture(params=["qwen3", "gemma3_text", "qwen2_moe"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_family_model(request.param, tmp_path / "model", tie_word_embeddings=request.param == "gemma3_text")


def test_a_checkpoint_becomes_the_hugging_face_model(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "megatron")
    save(stacked(tmp_path / "megatron"), tmp_path / "run" / "iter_0000012")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("12")
    convert(tmp_path / "run", tmp_path / "back", config=model)
    expected, written = load_file(model / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def test_a_critic_of_stacked_layers(tmp_path: Path) -> None:
    model = tiny_family_model("qwen2", tmp_path / "model", tie_word_embeddings=False)
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors | {"score.weight": torch.randn(1, 32)}, model / "model.safetensors", metadata={"format": "pt"})
    convert(model, tmp_path / "megatron", orm=True)
    save(stacked(tmp_path / "megatron"), tmp_path / "dist")
    convert(tmp_path / "dist", tmp_path / "back", config=model, orm=True)
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(written["score.weight"], load_file(model / "model.safetensors")["score.weight"])
    save(stacked(tmp_path / "megatron") | {"rm_head.bias": torch.ones(1)}, tmp_path / "biased")
    with pytest.raises(ConfigError, match=r"rm_head\.bias of zero"):
        convert(tmp_path / "biased", tmp_path / "other", config=model, orm=True)


def test_a_written_checkpoint_has_a_piece_for_each_layer_and_expert(tmp_path: Path) -> None:
    """The test also checks the name of the norm before the experts for the kind of layers."""
    model = tiny_family_model("qwen2_moe", tmp_path / "model", tie_word_embeddings=False)
    norms = {Layers.local: "mlp.linear_fc1.layer_norm_weight", Layers.transformer_engine: "pre_mlp_layernorm.weight"}
    for layers, norm in norms.items():
        convert(model, tmp_path / layers, file_format=CheckpointFormat.torch_dist, layers=layers, vocab_multiple=64)
        index = FileSystemReader(tmp_path / layers / "iter_0000001").read_metadata()
        found: dict[str, Any] = index.state_dict_metadata
        assert {name for name in norms.values() if f"decoder.layers.{name}" in found} == {norm}
        experts = found["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
        assert tuple(experts.size[:2]) == (2, 5)
        assert sorted(tuple(chunk.offsets[:2]) for chunk in experts.chunks) == list(itertools.product(range(2), range(5)))
        assert found["embedding.word_embeddings.weight"].size[0] == 64
    common = torch.load(tmp_path / layers / "iter_0000001" / "common.pt", weights_only=False)
    assert (common["iteration"], common["args"].num_experts) == (1, 5)
    assert (tmp_path / layers / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_a_critic_comes_back_from_a_written_checkpoint(tmp_path: Path) -> None:
    model = tiny_family_model("qwen3_moe", tmp_path / "model", tie_word_embeddings=False)
    tensors = load_file(model / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors["score.weight"] = torch.randn(1, 32)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    convert(model, tmp_path / "dist", orm=True, file_format=CheckpointFormat.torch_dist)
    convert(tmp_path / "dist", tmp_path / "back", config=model, orm=True)
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())


def test_a_layer_of_another_dtype_is_named(tmp_path: Path) -> None:
    model = tiny_family_model("llama", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"].bfloat16()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        convert(model, tmp_path / "dist", file_format=CheckpointFormat.torch_dist)
    assert caught.value.expected.endswith("decoder.layers.mlp.linear_fc2.weight")
    assert not (tmp_path / "dist").exists()


@pytest.mark.parametrize("option", ["tensor", "pipeline", "expert"])
def test_a_layout_is_refused(option: str, tmp_path: Path) -> None:
    model = tiny_family_model("llama", tmp_path / "model")
    layout: dict[str, Any] = {option: 2}
    with pytest.raises(ConfigError, match="torch_dist"):
        convert(model, tmp_path / "dist", file_format=CheckpointFormat.torch_dist, **layout)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Tensor], Path]:
    model = tiny_family_model("llama", tmp_path / "model")
    convert(model, tmp_path / "megatron")
    return model, stacked(tmp_path / "megatron"), tmp_path / "dist"


def test_missing_and_unexpected_tensors_are_named(saved: tuple[Path, dict[str, Tensor], Path], tmp_path: Path) -> None:
    model, state, folder = saved
    del state["decoder.layers.mlp.linear_fc2.weight"]
    save(state | {"decoder.layers.mlp.other.weight": torch.ones(2)}, folder)
    with pytest.raises(ConfigError) as caught:
        convert(folder, tmp_path / "back", config=model)
    assert "missing: decoder.layers.mlp.linear_fc2.weight" in caught.value.found
    assert "unexpected: decoder.layers.mlp.other.weight" in caught.value.found


def test_other_numbers_of_layers_are_named(saved: tuple[Path, dict[str, Tensor], Path], tmp_path: Path) -> None:
    model, state, folder = saved
    state["decoder.layers.input_layernorm.weight"] = torch.ones(3, 32)
    save(state, folder)
    with pytest.raises(ConfigError, match=r"input_layernorm.weight \(3, 32\) instead of \(2, 32\)"):
        convert(folder, tmp_path / "back", config=model)


def test_damaged_files_are_named(saved: tuple[Path, dict[str, Tensor], Path], tmp_path: Path) -> None:
    model, state, folder = saved
    save(state, folder)
    piece = next(folder.glob("*.distcp"))
    whole = piece.read_bytes()
    piece.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError) as caught:
        convert(folder, tmp_path / "back", config=model)
    assert piece.name in caught.value.expected
    (folder / ".metadata").write_bytes(b"nonsense")
    with pytest.raises(ConfigError) as caught:
        convert(folder, tmp_path / "back", config=model)
    assert ".metadata" in caught.value.expected
    assert not (tmp_path / "back").exists()
