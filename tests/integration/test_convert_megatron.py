"""`polyreme convert` with megatron-core itself, which loads the written files in both formats, and whose own files are converted back bit by bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polyreme_trainer.convert.command import CheckpointFormat, Layers, convert
from polyreme_trainer.megatron.huggingface.hf_mapping import VOCAB_MULTIPLE
from support import convert_checks
from support.models import tiny_family_model
from support.ranks import run_ranks

pytestmark = pytest.mark.real


def test_megatron_loads_what_is_written_and_writes_what_is_read(tmp_path: Path) -> None:
    models = [
        tiny_family_model("qwen2", tmp_path / "qwen2"),
        tiny_family_model("gemma3_text", tmp_path / "gemma3", tie_word_embeddings=False),
        tiny_family_model("qwen2_moe", tmp_path / "qwen2_moe", tie_word_embeddings=False),
        tiny_family_model("glm4_moe", tmp_path / "glm4_moe", tie_word_embeddings=False),
    ]
    for model in models:
        convert(model, tmp_path / "converted" / model.name, tensor=2, vocab_multiple=VOCAB_MULTIPLE)
        convert(model, tmp_path / "converted" / f"{model.name}-dist", file_format=CheckpointFormat.torch_dist)
    (tmp_path / "written").mkdir()
    names = json.dumps([str(model) for model in models])
    run_ranks(convert_checks.save_and_load, 2, names, str(tmp_path / "converted"), str(tmp_path / "written"), "2", timeout=280)
    for model in models:
        assert (tmp_path / "written" / model.name / ".metadata").is_file()
        convert(tmp_path / "written" / model.name, tmp_path / "back" / model.name, config=model)
        expected, back = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back" / model.name))
        assert back.keys() == expected.keys()
        assert all(torch.equal(back[name], expected[name]) for name in expected)


def test_megatron_loads_virtual_stages_and_experts_that_other_ranks_cut(tmp_path: Path) -> None:
    """The names and the numbers of the files are those that each rank expects."""
    moe = tiny_family_model("qwen3_moe", tmp_path / "moe", num_experts=4, num_hidden_layers=4, tie_word_embeddings=False)
    layouts: dict[Path, dict[str, int]] = {
        tiny_family_model("qwen3", tmp_path / "dense", num_hidden_layers=8): {"pipeline": 2, "virtual_pipeline": 2},
        tiny_family_model("qwen2_moe", tmp_path / "shared", num_experts=4): {"tensor": 2, "expert": 2, "expert_tensor": 1},
        moe: {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2, "expert": 4, "expert_tensor": 1},
    }
    for model, layout in layouts.items():
        convert(model, tmp_path / "converted" / model.name, vocab_multiple=VOCAB_MULTIPLE, **layout)  # type: ignore[arg-type]
    ranks = json.dumps({str(model): layout | {"data": 2 if model == moe else 1} for model, layout in layouts.items()})
    run_ranks(convert_checks.load_as_every_rank, 1, ranks, str(tmp_path / "converted"), timeout=280)


def test_megatron_computes_with_experts_in_two_matrices(tmp_path: Path) -> None:
    """The matrices are those that megatron-core's class of grouped experts loads and multiplies with."""
    fields = {"num_experts": 4, "num_hidden_layers": 4, "tie_word_embeddings": False}
    layouts: dict[Path, dict[str, int]] = {
        tiny_family_model("qwen3_moe", tmp_path / "one", **fields): {},
        tiny_family_model("qwen2_moe", tmp_path / "two", **fields): {"tensor": 2, "pipeline": 2, "expert": 2, "data": 2},
        tiny_family_model("qwen3_moe", tmp_path / "cut", **fields): {
            "tensor": 2,
            "pipeline": 2,
            "virtual_pipeline": 2,
            "expert": 2,
            "expert_tensor": 1,
        },
    }
    for model, layout in layouts.items():
        numbers = {name: count for name, count in layout.items() if name != "data"}
        convert(
            model,
            tmp_path / "converted" / model.name,
            vocab_multiple=VOCAB_MULTIPLE,
            layers=Layers.grouped,
            **numbers,  # type: ignore[arg-type]
        )
    ranks = json.dumps({str(model): layout for model, layout in layouts.items()})
    run_ranks(convert_checks.load_grouped_experts, 1, ranks, str(tmp_path / "converted"), timeout=280)
