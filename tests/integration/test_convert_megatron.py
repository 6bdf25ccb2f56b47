"""`polyreme convert` with megatron-core itself, which loads the written files in both formats, and whose own files are converted back bit by bit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polyreme_trainer.convert.command import CheckpointFormat, convert
from polyreme_trainer.megatron.hf_mapping import VOCAB_MULTIPLE
from support import convert_checks
from support.models import tiny_family_model
from support.ranks import run_ranks

pytestmark = pytest.mark.real


def test_megatron_loads_what_is_written_and_writes_what_is_read(tmp_path: Path) -> None:
    models = [
        tiny_family_model("qwen2", tmp_path / "qwen2"),
        tiny_family_model("gemma3_text", tmp_path / "gemma3", tie_word_embeddings=False),
        tiny_family_model("qwen2_moe", tmp_path / "qwen2_moe", tie_word_embeddings=False),
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
