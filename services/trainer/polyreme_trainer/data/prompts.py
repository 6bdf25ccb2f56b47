"""Reads a JSON lines file into prompts for rollouts and examples for supervised training.

Invariant: prompts and examples depend on the file, the model files and the `data` section alone, so an index names the same prompt after a
restart. Every token id has an embedding in the model. Every error names the file and the line.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from polyreme.config.data import DataConfig
from polyreme.config.dataset_rows import label_text, plain_prompt, read_objects
from polyreme.errors import DataError
from polyreme_trainer.data.template import PromptSource, Template

logger = logging.getLogger(__name__)


class Numbered(Protocol):
    """What has been read from a line of a file."""

    @property
    def line(self) -> int: ...


Result = TypeVar("Result")
Source = TypeVar("Source", bound=Numbered)


@dataclass(frozen=True)
class DatasetRow:
    """One line of a data file. `prompt` is a text or chat messages; `metadata` has every column except label and response."""

    line: int
    prompt: PromptSource
    label: str
    response: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for generation and scoring.

    Attributes:
        ids: int32 [length], the templated prompt.
        text: the templated prompt as text.
        metadata_json: a JSON object with the row's columns except the label.
        plain: the prompt before the template, as `plain_prompt` returns it.
    """

    ids: np.ndarray
    text: str
    label: str
    metadata_json: str
    plain: str


@dataclass(frozen=True)
class Dataset:
    """Usable prompts in file order, and the number of prompts that were left out because they are too long."""

    prompts: list[Prompt]
    filtered: int


@dataclass(frozen=True)
class Example:
    """A supervised sequence: `ids` int32 [length] is prompt, response and end token; `loss_mask` uint8 [length] is 1 after the prompt."""

    ids: np.ndarray
    loss_mask: np.ndarray


def read_rows(path: Path, data: DataConfig, *, response_key: str | None = None, limit: int | None = None) -> list[DatasetRow]:
    """The rows of a JSON lines file, without blank lines.

    Args:
        response_key: the required text column of supervised data; None: rows have no response.
        limit: the number of rows to read; None: all.

    Raises:
        DataError: the file is missing or empty, or a line is not a usable row.
    """
    objects = islice(read_objects(path), limit)
    return [_row(fields, f"{path}:{number}", number, data, response_key) for number, fields in objects]


def load_prompts(path: Path, data: DataConfig, template: Template) -> Dataset:
    """Reads, renders and encodes the prompts of a file. Prompts beyond `max_prompt_tokens` are left out and counted.

    Raises:
        DataError: a row is unusable, a prompt is too long under `overlong: error`, or all prompts are.
    """
    dataset = encode_prompts(read_rows(path, data), path, data, template)
    if not dataset.prompts:
        raise all_too_long(dataset, path, data)
    if dataset.filtered:
        total = len(dataset.prompts) + dataset.filtered
        limit = data.max_prompt_tokens
        logger.warning("%s: %d of %d prompts are longer than %d tokens and are left out", path, dataset.filtered, total, limit)
    return dataset


def encode_prompts(rows: Sequence[DatasetRow], path: Path, data: DataConfig, template: Template) -> Dataset:
    """The prompts of rows that were read from `path`. Raises DataError: a row is unusable, or too long under `overlong: error`."""
    texts = each_or_blame(lambda some: template.render([row.prompt for row in some]), rows, path)
    prompts, filtered = [], 0
    for row, text, ids in zip(rows, texts, template.encode_prompts(texts), strict=True):
        if len(ids) == 0:
            raise DataError(f"a prompt with tokens in {path}:{row.line}", "an empty one", "Remove or fill the row.")
        if len(ids) <= data.max_prompt_tokens:
            check_ids(ids, template, f"{path}:{row.line}")
            metadata = json.dumps(row.metadata, ensure_ascii=False)
            prompts.append(Prompt(ids, text, row.label, metadata, plain_prompt(row.prompt)))
        elif data.overlong == "error":
            raise DataError(
                f"at most data.max_prompt_tokens = {data.max_prompt_tokens} tokens in {path}:{row.line}",
                f"{len(ids)}",
                "Raise data.max_prompt_tokens, shorten the prompt, or set data.overlong: filter.",
            )
        else:
            filtered += 1
    return Dataset(prompts, filtered)


def all_too_long(dataset: Dataset, path: Path, data: DataConfig) -> DataError:
    """The error for a file in which every prompt is too long."""
    return DataError(
        f"prompts of at most data.max_prompt_tokens = {data.max_prompt_tokens} tokens in {path}",
        f"{dataset.filtered}, all longer",
        "Raise data.max_prompt_tokens.",
    )


def load_examples(path: Path, data: DataConfig, template: Template, max_tokens: int) -> list[Example]:
    """Supervised examples of a file with a `response` column, in file order: the conversation as the template writes it.

    Raises:
        DataError: a row is unusable, or has more than `max_tokens` tokens.
    """
    return encode_examples(read_rows(path, data, response_key="response"), path, template, max_tokens)


def encode_examples(rows: Sequence[DatasetRow], path: Path, template: Template, max_tokens: int) -> list[Example]:
    """The examples of rows that were read from `path`. Raises as `load_examples`."""
    conversations = each_or_blame(
        lambda some: template.converse([row.prompt for row in some], [row.response for row in some]), rows, path
    )
    examples = []
    for row, (ids, start) in zip(rows, template.encode_conversations(conversations), strict=True):
        if len(ids) > max_tokens:
            raise DataError(
                f"prompt, response and end token within {max_tokens} tokens in {path}:{row.line}",
                f"{len(ids)}",
                "Shorten the row, or raise rollout.max_model_len.",
            )
        check_ids(ids, template, f"{path}:{row.line}")
        mask = np.zeros(len(ids), dtype=np.uint8)
        mask[start:] = 1
        examples.append(Example(ids, mask))
    return examples


def check_ids(ids: np.ndarray, template: Template, where: str) -> None:
    """Raises DataError for ids without an embedding: their losses and gradients would be meaningless."""
    if (highest := int(ids.max(initial=0))) >= template.embeddings:
        raise DataError(
            f"token ids below the model's {template.embeddings} embeddings (vocab_size in config.json) in {where}",
            f"id {highest}, from a tokenizer with {template.tokens} tokens",
            "Use the tokenizer that belongs to the model, or resize the model's embeddings.",
        )


def each_or_blame(apply: Callable[[Sequence[Source]], list[Result]], rows: Sequence[Source], path: Path) -> list[Result]:
    """Applies `apply` to all rows at once, if there are any. When that fails, finds the first bad row, so that the DataError names it."""
    try:
        return apply(rows) if rows else []
    except DataError:
        for row in rows:
            try:
                apply([row])
            except DataError as error:
                raise DataError(f"{error.expected} in {path}:{row.line}", error.found, error.do) from error
        raise


def _row(fields: Mapping[str, Any], where: str, number: int, data: DataConfig, response_key: str | None) -> DatasetRow:
    prompt = prompt_of(column(fields, data.prompt_key, where, "data.prompt_key"), f"{data.prompt_key!r} in {where}")
    label = _text(fields.get(data.label_key), f"{data.label_key!r} in {where}")
    response = ""
    if response_key is not None:
        value = column(fields, response_key, where, "the data")
        if not isinstance(value, str):
            raise DataError(f"a text in {response_key!r} in {where}", type(value).__name__, "Fix the row.")
        response = value
    roles = {data.label_key, response_key}  # the prompt stays: a reward model renders it with its own template
    return DatasetRow(number, prompt, label, response, {key: value for key, value in fields.items() if key not in roles})


def column(fields: Mapping[str, Any], key: str, where: str, setting: str) -> Any:
    """A required column; `setting` names it in the configuration. Raises DataError."""
    if key not in fields:
        raise DataError(f"a column {key!r} in {where}", f"columns {sorted(fields)}", f"Fix the row, or {setting}.")
    return fields[key]


def prompt_of(value: Any, what: str) -> PromptSource:
    """A text, a list with one text (PaddleNLP's `src`), or chat messages. Raises DataError."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise DataError(f"a prompt in {what}", "an empty text", "Remove or fill the row.")
        return value
    if isinstance(value, list) and value and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        if value[-1]["role"] == "assistant":
            raise DataError(f"messages that end before the answer in {what}", "a last message by the assistant", "Remove it.")
        return tuple(value)
    raise DataError(f"a text or a list of chat messages {{role, content}} in {what}", f"{value!r:.80}", "Fix the row.")


def _text(value: Any, what: str) -> str:
    try:
        return label_text(value)
    except TypeError as error:
        raise DataError(f"a text or number in {what}", str(error), "Fix the row, or data.label_key.") from None
