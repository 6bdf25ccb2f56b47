"""A policy as a Hugging Face directory that transformers and vLLM load, and its critic as one within it.

Invariant: a directory of that name is complete, the critic's included.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from polyreme_trainer.megatron.atomic import new_directory

CRITIC = "critic"
"""The critic's directory within the policy's."""


@dataclass(frozen=True)
class Export:
    """A model that is exported.

    Attributes:
        tensors: every Hugging Face tensor, whole, without aliases (a tied lm_head follows from the config); all of one dtype. Views
            into an arena slot will do.
        model_files: config.json and the tokenizer's files by name, as the run started with.
    """

    tensors: Mapping[str, Tensor]
    model_files: Mapping[str, bytes]


def export_hf(directory: Path, policy: Export, critic: Export | None = None) -> None:
    """Writes `directory` atomically, replacing what is there; the critic's is a sequence classifier with one label."""
    with new_directory(directory) as temporary:
        _write(temporary, policy)
        if critic is not None:
            (temporary / CRITIC).mkdir()
            _write(temporary / CRITIC, classifier(critic))


def classifier(model: Export, **fields: Any) -> Export:
    """The export as a sequence classifier with one label. `fields` replace those of its config.json."""
    config = json.loads(model.model_files["config.json"])
    architectures = [name.replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
    config |= {"architectures": architectures, "id2label": {"0": "value"}, "label2id": {"value": 0}, **fields}
    return replace(model, model_files={**model.model_files, "config.json": json.dumps(config).encode()})


def _write(folder: Path, model: Export) -> None:
    dtype = str(next(iter(model.tensors.values())).dtype).removeprefix("torch.")
    for name, content in model.model_files.items():
        (folder / name).write_bytes(_with_dtype(content, dtype) if name == "config.json" else content)
    save_file(dict(model.tensors), folder / "model.safetensors", metadata={"format": "pt"})


def _with_dtype(config: bytes, dtype: str) -> bytes:
    """config.json that names the dtype of the weights beside it, under the key it already uses."""
    fields = json.loads(config)
    fields["torch_dtype" if "torch_dtype" in fields else "dtype"] = dtype
    return json.dumps(fields, indent=2).encode()
