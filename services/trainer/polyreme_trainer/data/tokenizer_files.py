"""Reads a model directory's tokenizer files, which are bytes in the run's record.

Invariant: a missing or damaged field raises a ConfigError that names the file and the field. This module imports no torch.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from polyreme.errors import ConfigError
from polyreme.process.quick_imports import quick_imports

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(files: Mapping[str, bytes]) -> "PreTrainedTokenizerFast":
    """A model directory's fast tokenizer, without truncation and padding. Raises ConfigError when transformers cannot load it."""
    with quick_imports():
        from transformers import PreTrainedTokenizerFast  # it takes 1.5 s, and most learner ranks build no template

    if "tokenizer.json" not in files:
        raise ConfigError(
            "tokenizer.json in the model directory",
            ", ".join(sorted(files)) or "no files",
            "Save a fast tokenizer there: AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained(...).",
        )
    with tempfile.TemporaryDirectory(prefix="polyreme-tokenizer-") as folder:
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers and tokenizers raise plain Exception on malformed files
            raise ConfigError(
                "tokenizer files that transformers loads", f"{type(error).__name__}: {error}", "Save the tokenizer again."
            ) from error
    # A tokenizer that was used for batches is saved with its truncation and padding.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def read_embeddings(files: Mapping[str, bytes]) -> int:
    """The rows of the model's embedding. Raises ConfigError when config.json has no such number."""
    size = _read_json(files, "config.json").get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError("vocab_size, a positive number, in the model's config.json", repr(size), "Save the model again.")
    return size


def _read_json(files: Mapping[str, bytes], name: str) -> dict[str, object]:
    """A JSON file of the model directory; empty when there is none."""
    try:
        content = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ConfigError(f"JSON in the model's {name}", str(error), "Save the model again.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"a JSON object in the model's {name}", type(content).__name__, "Save the model again.")
    return content


def find_stop_ids(tokenizer: "PreTrainedTokenizerFast", files: Mapping[str, bytes], embeddings: int) -> tuple[int, ...]:
    """Ids that end a response, ascending: see `Template`. Raises ConfigError when there is none, or one without an embedding."""
    generation = _read_json(files, "generation_config.json").get("eos_token_id")
    ids = generation if isinstance(generation, list) else [generation]
    stop = {i for i in (*ids, tokenizer.eos_token_id) if i is not None}
    if not stop:
        raise ConfigError(
            "an end token in tokenizer_config.json (eos_token) or generation_config.json (eos_token_id)",
            "none",
            "Name the token that ends a response.",
        )
    if wrong := [i for i in stop if not isinstance(i, int) or not 0 <= i < embeddings]:
        raise ConfigError(
            f"end tokens among the model's {embeddings} embeddings (vocab_size in config.json)",
            f"id {wrong[0]!r} in tokenizer_config.json or generation_config.json",
            "Use the tokenizer that belongs to the model, or resize the model's embeddings.",
        )
    return tuple(sorted(stop))
