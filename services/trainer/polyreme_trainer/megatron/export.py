"""Exports a policy as a Hugging Face directory that transformers and vLLM load, and its critic as a directory within it.

Invariant: an exported directory is complete, including the critic's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from polyreme_trainer.megatron.atomic import new_directory

CRITIC = "critic"
"""The critic's directory within the policy's."""


@dataclass(frozen=True)
class Export:
    """A model to export.

    Attributes:
        tensors: every Hugging Face tensor, whole and of one dtype, without aliases (a tied lm_head follows from the config). They may be
            views into an arena slot.
        model_files: config.json and the tokenizer's files by name, as at the run's start.
    """

    tensors: Mapping[str, Tensor]
    model_files: Mapping[str, bytes]


def export_hf(directory: Path, policy: Export, critic: Export | None = None) -> None:
    """Writes `directory` atomically and replaces an existing one. The critic becomes a sequence classifier with one label."""
    with new_directory(directory) as temporary:
        _write(temporary, policy)
        if critic is not None:
            (temporary / CRITIC).mkdir()
            files = {**critic.model_files, "config.json": _classifier(critic.model_files["config.json"])}
            _write(temporary / CRITIC, replace(critic, model_files=files))


def _write(folder: Path, model: Export) -> None:
    dtype = str(next(iter(model.tensors.values())).dtype).removeprefix("torch.")
    for name, content in model.model_files.items():
        (folder / name).write_bytes(_with_dtype(content, dtype) if name == "config.json" else content)
    save_file(dict(model.tensors), folder / "model.safetensors", metadata={"format": "pt"})


def _classifier(config: bytes) -> bytes:
    """Converts a language model's config.json to that of a sequence classifier with one label."""
    fields = json.loads(config)
    architectures = [name.replace("ForCausalLM", "ForSequenceClassification") for name in fields["architectures"]]
    return json.dumps({**fields, "architectures": architectures, "id2label": {"0": "value"}, "label2id": {"value": 0}}).encode()


def _with_dtype(config: bytes, dtype: str) -> bytes:
    """config.json with the dtype of the exported weights, under the key that it already uses."""
    fields = json.loads(config)
    fields["torch_dtype" if "torch_dtype" in fields else "dtype"] = dtype
    return json.dumps(fields, indent=2).encode()
