"""The input files of a run: the model directory and the data sets that its configuration names.

Invariant: every missing or truncated input is an error before anything starts. Checks read no weights, only headers.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

from polyreme.config.data import DataSource, Sources
from polyreme.config.run import RunConfig
from polyreme.config.stage import DpoConfig, StageConfig
from polyreme.dataset.source import as_sources, files_of
from polyreme.errors import AbsentError, ConfigError, DataError, PolyremeError, results

MODEL_FILES = ("config.json", "tokenizer.json")
"""The files of a Hugging Face model that a run needs besides its weights."""
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
    """Bytes of `Sample.routes`, the experts reported for each sampled token: one per choice and layer, two beyond 256 experts.

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


def input_errors(config: RunConfig | StageConfig) -> Iterator[PolyremeError]:
    """Yields an error per missing or truncated file of the configuration, and one when samples may exceed the model's context."""
    yield from results(
        *(_weight_errors(model_dir, key) for key, model_dir in _models(config).items()),
        _context_errors(config),
        *(_data_errors(key, source) for key, sources in _named_data(config).items() for source in as_sources(sources)),
    )


def is_there(source: DataSource) -> bool:
    """Whether the files of a source exist. `input_errors` reports those that do not, so other checks leave them out."""
    return not list(results(_data_errors("data", source)))


def _models(config: RunConfig | StageConfig) -> dict[str, Path]:
    """The Hugging Face directories from which weights are read, by key."""
    found: dict[str, Path | None] = {"model.path": config.model.path}
    if isinstance(config, RunConfig):
        found["trainer.critic.path"] = config.trainer.critic.path if config.algorithm.has_critic else None
    elif isinstance(config, DpoConfig):
        found["reference"] = config.reference
    return {key: path for key, path in found.items() if path is not None}


def _named_data(config: RunConfig | StageConfig) -> dict[str, Sources]:
    """The data sources, by key."""
    named: dict[str, Sources | None] = {"data.train": config.data.train, "data.eval": config.data.eval}
    if isinstance(config, RunConfig):
        named |= {f"eval_sets.{place}.data": each.data for place, each in enumerate(config.eval_sets)}
        named |= {f"trainer.sft.{place}.data": phase.data for place, phase in enumerate(config.trainer.sft)}
        named["algorithm.ptx.data"] = config.algorithm.ptx.data if config.algorithm.ptx else None
    return {key: sources for key, sources in named.items() if sources is not None}


def _weight_errors(model_dir: Path, key: str) -> Iterator[ConfigError]:
    _check_model_dir(model_dir, key, MODEL_FILES if key == "model.path" else MODEL_FILES[:1])
    weights = sorted(model_dir.glob("*.safetensors"))
    if not weights:
        yield AbsentError(f"weights (*.safetensors) in {key} = {model_dir}", "none", "Save the model with save_pretrained.")
    for shard in weights:
        yield from _whole_errors(shard)


def _context_errors(config: RunConfig | StageConfig) -> Iterator[ConfigError]:
    path = config.model.path / "config.json"
    if not path.is_file():  # an error of its own
        return
    advice = "Lower data.max_tokens, or use a model with a longer context."
    key, longest = "data.max_tokens", config.data.max_tokens if isinstance(config, StageConfig) else 0
    if isinstance(config, RunConfig):
        key, longest = "rollout.max_model_len", config.rollout.max_model_len
        advice = (
            "Lower rollout.max_model_len, data.max_prompt_tokens and rollout.max_new_tokens, or use a model with a longer"
            " context."
        )
    context = context_of(path)
    if context is not None and longest > context:
        yield ConfigError(f"{key} within the model's context of {context} tokens (max_position_embeddings)", str(longest), advice)


def _data_errors(key: str, source: DataSource) -> Iterator[ConfigError]:
    try:
        files = files_of(source.path)
    except DataError as error:
        raise AbsentError(f"{error.expected}, of {key}", error.found, error.do) from error
    for path in files:
        if not path.is_file():
            yield AbsentError(f"a file at {key} = {path}", "no such file", f"Fix {key}, or create the file.{_created_by(path)}")


def _check_model_dir(model_dir: Path, key: str = "model.path", names: Sequence[str] = MODEL_FILES) -> None:
    for name in names:
        if not (model_dir / name).is_file():
            raise AbsentError(
                f"a Hugging Face model directory at {key} = {model_dir}",
                f"no {name} in it" if model_dir.is_dir() else "no such directory",
                _created_by(model_dir).strip()
                or f"Fix {key}; `polyreme init FOLDER` creates a tiny model to try a run without another.",
            )


def _created_by(path: Path) -> str:
    """A sentence that names the script beside a missing path that creates it, as in examples/; else ''."""
    script = path.parent / "prepare.py"
    return f" Run `python {quote(str(script))}`, which creates it." if script.is_file() else ""


def _whole_errors(path: Path) -> Iterator[ConfigError]:
    """Yields an error for a truncated or missing download. Reads only the safetensors header."""
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
        yield ConfigError(f"complete weights in {path}", found, "Download or save the file again (with Git LFS: `git lfs pull`).")


def context_of(path: Path) -> int | None:
    """`max_position_embeddings` of a model's config.json, or None when it is absent. The learner takes no longer sequence,
    whatever RoPE scaling the file has: one with a longer context says so in this field."""
    try:
        model = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"JSON in {path}", str(error), "Save the model with save_pretrained.") from None
    if not isinstance(model, dict):
        raise ConfigError(f"a JSON object in {path}", type(model).__name__, "Save the model with save_pretrained.")
    return model.get("max_position_embeddings")
