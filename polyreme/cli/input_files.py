"""The input files of a run: the model directory and the data sets that its configuration names.

Invariant: a missing or truncated input is an error before anything starts. Checks read no weights, only headers.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from polyreme.config.data import Sources
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.dataset.source import as_sources, files_of
from polyreme.errors import ConfigError, DataError

_MODEL_FILE_SUFFIXES = (".json", ".jinja", ".txt", ".model")
_LARGEST_HEADER = 100_000_000
"""Maximum size of a safetensors header in bytes, the format's own limit."""


def read_model_files(model_dir: Path) -> dict[str, bytes]:
    """The model files that a replica needs besides the weights: architecture, tokenizer, chat template. Contents by file name.

    Raises:
        ConfigError: the directory is not a Hugging Face model with a fast tokenizer.
    """
    _check_model_dir(model_dir)
    return {
        path.name: path.read_bytes()
        for path in sorted(model_dir.iterdir())
        if path.is_file() and path.suffix in _MODEL_FILE_SUFFIXES and not path.name.endswith(".index.json")
    }


def route_bytes(model_dir: Path) -> int:
    """Bytes of the experts that a replica reports for each sampled token, `Sample.routes`: one for each choice in each layer, two beyond 256 experts.

    Raises:
        ConfigError: config.json does not have the numbers.
    """
    try:
        fields = json.loads((model_dir / "config.json").read_text())
        experts = fields["num_experts"] if "num_experts" in fields else fields["num_local_experts"]
        return int(fields["num_hidden_layers"]) * int(fields["num_experts_per_tok"]) * (1 if int(experts) <= 256 else 2)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the number of layers and experts in {model_dir / 'config.json'}, for trainer.moe.replay_routes",
            f"{type(error).__name__}: {error}",
            "Use a model with experts, or set trainer.moe.replay_routes to false.",
        ) from None


def check_inputs(config: RunConfig) -> None:
    """Checks that the files of the configuration exist and that the samples fit the model's context.

    Raises:
        ConfigError: a file is missing or truncated, or samples may exceed the model's context.
    """
    _check_weights(config.model.path)
    _check_context(
        config.model.path,
        "rollout.max_model_len",
        config.rollout.max_model_len,
        "Lower rollout.max_model_len, data.max_prompt_tokens and rollout.max_new_tokens, or use a model with a longer context.",
    )
    named: dict[str, Sources | None] = {"data.train": config.data.train, "data.eval": config.data.eval}
    named |= {f"eval_sets.{place}.data": each.data for place, each in enumerate(config.eval_sets)}
    named |= {f"trainer.sft.{place}.data": phase.data for place, phase in enumerate(config.trainer.sft)}
    named["algorithm.ptx.data"] = config.algorithm.ptx.data if config.algorithm.ptx else None
    _check_files(named)


def check_stage_inputs(config: StageConfig) -> None:
    """Checks the same for a stage, whose rows must fit the model's context. Raises ConfigError."""
    _check_weights(config.model.path)
    advice = "Lower data.max_tokens, or use a model with a longer context."
    _check_context(config.model.path, "data.max_tokens", config.data.max_tokens, advice)
    _check_files({"data.train": config.data.train, "data.eval": config.data.eval})


def _check_weights(model_dir: Path) -> None:
    _check_model_dir(model_dir)
    weights = sorted(model_dir.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"weights (*.safetensors) in model.path = {model_dir}", "none", "Save the model with save_pretrained.")
    for shard in weights:
        _check_whole(shard)


def _check_context(model_dir: Path, key: str, longest: int, advice: str) -> None:
    context = _context(model_dir / "config.json")
    if context is not None and longest > context:
        raise ConfigError(f"{key} within the model's context of {context} tokens (max_position_embeddings)", str(longest), advice)


def _check_files(named: Mapping[str, Sources | None]) -> None:
    for key, sources in named.items():
        for source in as_sources(sources) if sources is not None else ():
            try:
                files = files_of(source.path)
            except DataError as error:
                raise ConfigError(f"{error.expected}, of {key}", error.found, error.do) from error
            if missing := [path for path in files if not path.is_file()]:
                raise ConfigError(f"a file at {key} = {missing[0]}", "no such file", f"Fix {key}, or create the file.")


def _check_model_dir(model_dir: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        if not (model_dir / name).is_file():
            raise ConfigError(
                f"a Hugging Face model directory at model.path = {model_dir}",
                f"no {name} in it" if model_dir.is_dir() else "no such directory",
                "Fix model.path. examples/running_total/prepare.py creates the demo's model.",
            )


def _check_whole(path: Path) -> None:
    """Refuses a truncated or missing download before anything starts. Reads only the safetensors header."""
    with open(path, "rb") as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if 8 + length <= min(size, _LARGEST_HEADER) else {}
            end = (
                8
                + length
                + max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
            )
        except (ValueError, TypeError, LookupError, AttributeError):
            end = -1
    if end != size:
        found = f"{size:,} bytes, which does not match its header" if end >= 0 else "no safetensors header"
        raise ConfigError(f"complete weights in {path}", found, "Download or save the file again (with Git LFS: `git lfs pull`).")


def _context(path: Path) -> int | None:
    """`max_position_embeddings` of a model's config.json, or None when it is absent or RoPE scaling extends it."""
    try:
        model = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"JSON in {path}", str(error), "Save the model with save_pretrained.") from None
    if not isinstance(model, dict):
        raise ConfigError(f"a JSON object in {path}", type(model).__name__, "Save the model with save_pretrained.")
    scaled = model.get("rope_scaling") or (model.get("rope_parameters") or {}).get("rope_type", "default") != "default"
    return None if scaled else model.get("max_position_embeddings")
