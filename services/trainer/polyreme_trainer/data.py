"""Rows of a JSON lines file, as prompts for rollouts and as examples for supervised training.

Invariant: what a row becomes depends on the file and the `data` section alone, so that an index names the same prompt after a restart.
Every complaint names the file and the line.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from polyreme.config import DataConfig
from polyreme.errors import DataError
from polyreme.rows import label_text, lines_of, plain_prompt
from polyreme_trainer.template import PromptSource, Template

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One line: `prompt` is a text or chat messages, `metadata` the columns with no role of their own, and the prompt as it stands there."""

    line: int
    prompt: PromptSource
    label: str
    response: str
    metadata: dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for generation and scoring.

    `ids` int32 [length], the templated prompt; `text` the same as text; `metadata_json` the row's columns without its label; `plain` the
    prompt before the template, as `plain_prompt` gives it.
    """

    ids: np.ndarray
    text: str
    label: str
    metadata_json: str
    plain: str


@dataclass(frozen=True)
class Dataset:
    """Usable prompts in file order, and how many were left out as too long."""

    prompts: list[Prompt]
    filtered: int


@dataclass(frozen=True)
class Example:
    """A supervised sequence: `ids` int32 [length] is prompt, response, end token; `loss_mask` uint8 [length], 1 behind the prompt."""

    ids: np.ndarray
    loss_mask: np.ndarray


def read_rows(path: Path, data: DataConfig, *, response_key: str | None = None) -> list[Row]:
    """All rows of a JSON lines file, blank lines left out.

    Args:
        response_key: a required text column (supervised data); none: rows have no response.

    Raises:
        DataError: the file is missing or empty, or a line is no usable row.
    """
    try:
        lines = lines_of(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"a JSON lines file at {path}", error.strerror or str(error), "Mend the path in `data`.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"UTF-8 text in {path}", str(error), "Save the file as UTF-8.") from error
    rows = [_row(line, f"{path}:{n}", n, data, response_key) for n, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f"at least one row in {path}", "none", "Put one JSON object per line there.")
    return rows


def load_prompts(path: Path, data: DataConfig, template: Template) -> Dataset:
    """Reads, renders and encodes the prompts of a file; those beyond `max_prompt_tokens` are filtered and counted.

    Raises:
        DataError: a row is unusable, a prompt is too long under `overlong: error`, or all prompts are.
    """
    rows = read_rows(path, data)
    texts = _render(rows, template, path)
    prompts, filtered = [], 0
    for row, text, ids in zip(rows, texts, template.encode_prompts(texts), strict=True):
        if len(ids) == 0:
            raise DataError(f"a prompt with tokens in {path}:{row.line}", "an empty one", "Remove or fill the row.")
        if len(ids) <= data.max_prompt_tokens:
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
    if not prompts:
        raise DataError(
            f"prompts of at most data.max_prompt_tokens = {data.max_prompt_tokens} tokens in {path}",
            f"{filtered}, all longer",
            "Raise data.max_prompt_tokens.",
        )
    if filtered:
        log.warning(
            "%s: %d of %d prompts are longer than %d tokens and left out", path, filtered, len(rows), data.max_prompt_tokens
        )
    return Dataset(prompts, filtered)


def load_examples(path: Path, data: DataConfig, template: Template, max_tokens: int) -> list[Example]:
    """Supervised examples of a file with a `response` column, in file order.

    Raises:
        DataError: a row is unusable, or prompt, response and end token are more than `max_tokens`.
    """
    rows = read_rows(path, data, response_key="response")
    prompts = template.encode_prompts(_render(rows, template, path))
    responses = template.encode([row.response for row in rows])
    end = np.array([template.end_id], dtype=np.int32)
    examples = []
    for row, prompt, response in zip(rows, prompts, responses, strict=True):
        ids = np.concatenate([prompt, response, end])
        if len(ids) > max_tokens:
            raise DataError(
                f"prompt, response and end token within {max_tokens} tokens in {path}:{row.line}",
                f"{len(ids)}",
                "Shorten the row, or raise rollout.max_model_len.",
            )
        mask = np.zeros(len(ids), dtype=np.uint8)
        mask[len(prompt) :] = 1
        examples.append(Example(ids, mask))
    return examples


def _render(rows: Sequence[Row], template: Template, path: Path) -> list[str]:
    try:
        return template.render([row.prompt for row in rows])
    except DataError:
        for row in rows:  # only to say which one it was
            try:
                template.render([row.prompt])
            except DataError as error:
                raise DataError(f"{error.expected} in {path}:{row.line}", error.found, error.do) from error
        raise


def _row(line: str, where: str, number: int, data: DataConfig, response_key: str | None) -> Row:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"a JSON object in {where}", f"{error.msg} at column {error.colno}", "Mend the line.") from None
    if "\\u" in line:
        _check_characters(fields, where)
    if not isinstance(fields, dict):
        raise DataError(f"a JSON object in {where}", type(fields).__name__, "Write one object per line.")
    prompt = _prompt(_column(fields, data.prompt_key, where, "data.prompt_key"), f"{data.prompt_key!r} in {where}")
    label = _text(fields.get(data.label_key), f"{data.label_key!r} in {where}")
    response = ""
    if response_key is not None:
        value = _column(fields, response_key, where, "the data")
        if not isinstance(value, str):
            raise DataError(f"a text in {response_key!r} in {where}", type(value).__name__, "Mend the row.")
        response = value
    roles = {data.label_key, response_key}  # a reward model puts the prompt into a template of its own
    return Row(number, prompt, label, response, {key: value for key, value in fields.items() if key not in roles})


def _check_characters(fields: Any, where: str) -> None:
    """JSON can escape half a character, which no text in UTF-8 can hold."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        raise DataError(
            f"whole characters in {where}", f"{half}, one half of a pair", "Mend the text: it was cut there."
        ) from None


def _column(fields: Mapping[str, Any], key: str, where: str, setting: str) -> Any:
    if key not in fields:
        raise DataError(f"a column {key!r} in {where}", f"columns {sorted(fields)}", f"Mend the row, or {setting}.")
    return fields[key]


def _prompt(value: Any, what: str) -> PromptSource:
    """A text, a list with one text (PaddleNLP's `src`), or chat messages."""
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
    raise DataError(f"a text or a list of chat messages {{role, content}} in {what}", f"{value!r:.80}", "Mend the row.")


def _text(value: Any, what: str) -> str:
    try:
        return label_text(value)
    except TypeError as error:
        raise DataError(f"a text or number in {what}", str(error), "Mend the row, or data.label_key.") from None
