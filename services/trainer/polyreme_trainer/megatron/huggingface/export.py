"""Exports a policy as a Hugging Face directory that transformers and vLLM load, with its critic, its moving average and its
adapters as subdirectories.

Invariant: an exported directory is complete, including its subdirectories.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from polyreme_trainer.megatron.atomic import new_directory
from polyreme_trainer.megatron.huggingface.hf_files import save_tensors
from polyreme_trainer.megatron.huggingface.peft_files import PeftAdapter

CRITIC = "critic"
"""The critic's directory within the policy's."""
EMA = "ema"
"""The moving average's directory within the policy's."""
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
"""The fields of config.json with the number of layers for multi-token prediction (MTP)."""
ADAPTER = "adapter"
"""The adapters' directory in PEFT format. In the policy's directory itself, transformers would add them to the merged weights."""


@dataclass(frozen=True)
class Export:
    """A model to export.

    Attributes:
        tensors: every whole Hugging Face tensor, without aliases (a tied lm_head follows from the config). The first one has the
            model's dtype. They may be views into an arena slot.
        model_files: config.json and the tokenizer's files by name, from the run's start.
        adapter: the adapters, which `tensors` already contains.
    """

    tensors: Mapping[str, Tensor]
    model_files: Mapping[str, bytes]
    adapter: PeftAdapter | None = None


def export_hf(directory: Path, policy: Export, further: Mapping[str, Export] = MappingProxyType({})) -> None:
    """Writes `directory` atomically and replaces an existing one. `further` maps names of subdirectories to more models to write.

    The critic becomes a sequence classifier with one label.
    """
    with new_directory(directory) as temporary:
        _write(temporary, policy)
        for name, model in further.items():
            (temporary / name).mkdir()
            _write(temporary / name, as_classifier(model) if name == CRITIC else model)


def as_classifier(model: Export, **fields: object) -> Export:
    """The export of a language model with the config.json of a sequence classifier with one label.

    `fields` replace those of config.json.
    """
    config = json.loads(classifier_config(model.model_files["config.json"])) | fields
    return replace(model, model_files={**model.model_files, "config.json": json.dumps(config).encode()})


def _write(folder: Path, model: Export) -> None:
    dtype = str(next(iter(model.tensors.values())).dtype).removeprefix("torch.")
    for name, content in model.model_files.items():
        (folder / name).write_bytes(with_dtype(content, dtype) if name == "config.json" else content)
    save_tensors(model.tensors, folder / "model.safetensors")
    if model.adapter is not None:
        (folder / ADAPTER).mkdir()
        model.adapter.write(folder / ADAPTER)


def classifier_config(config: bytes) -> bytes:
    """Converts a language model's config.json to that of a sequence classifier with one label."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES  # takes a second

    fields = json.loads(config)
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[fields["model_type"]]
    return json.dumps({**fields, "architectures": [name], "id2label": {"0": "value"}, "label2id": {"value": 0}}).encode()


def with_dtype(config: bytes, dtype: str) -> bytes:
    """config.json with the exported weights' dtype, under its present key, and without MTP layers, which are not exported."""
    fields = json.loads(config)
    fields |= dict.fromkeys(fields.keys() & MTP_LAYERS, 0)
    fields["torch_dtype" if "torch_dtype" in fields else "dtype"] = dtype
    return json.dumps(fields, indent=2).encode()
