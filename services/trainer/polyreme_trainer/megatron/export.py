"""A policy as a Hugging Face directory that transformers and vLLM load."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from polyreme_trainer.megatron.atomic import new_directory


def export_hf(directory: Path, tensors: Mapping[str, Tensor], model_files: Mapping[str, bytes]) -> None:
    """Writes `directory` atomically, replacing what is there.

    Args:
        tensors: every Hugging Face tensor, whole, without aliases (a tied lm_head follows from the config); all of one dtype. Views
            into an arena slot will do.
        model_files: config.json and the tokenizer's files by name, as the run started with.
    """
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    with new_directory(directory) as temporary:
        for name, content in model_files.items():
            (temporary / name).write_bytes(_with_dtype(content, dtype) if name == "config.json" else content)
        save_file(dict(tensors), temporary / "model.safetensors", metadata={"format": "pt"})


def _with_dtype(config: bytes, dtype: str) -> bytes:
    """config.json that names the dtype of the weights beside it, under the key it already uses."""
    fields = json.loads(config)
    fields["torch_dtype" if "torch_dtype" in fields else "dtype"] = dtype
    return json.dumps(fields, indent=2).encode()
