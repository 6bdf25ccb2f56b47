"""Supervised rows of a stage: a prompt with its response, or messages of several turns.

Invariant: a row's text is the conversation as the chat template writes it, with one end token after each answer that is trained on.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from polyreme.config.dataset_rows import read_objects
from polyreme.config.stage import SftData
from polyreme.errors import DataError
from polyreme_trainer.data.prompts import Example, column, each_or_blame, prompt_of
from polyreme_trainer.data.stage_rows import Encoded, StageRows, assemble, examples_of
from polyreme_trainer.data.template import PromptSource, Template


@dataclass(frozen=True)
class Answered:
    """A prompt with its response."""

    line: int
    prompt: PromptSource
    response: str


@dataclass(frozen=True)
class Turns:
    """A conversation of several turns."""

    line: int
    messages: tuple[dict[str, Any], ...]


def read_supervised(path: Path, data: SftData, template: Template, limit: int | None = None) -> StageRows:
    """The rows of a JSON lines file.

    Args:
        limit: how many lines to read; none: all.

    Raises:
        DataError: the file is missing or empty, or a row is unusable.
    """
    rows = [_row(fields, f"{path}:{number}", number, data) for number, fields in islice(read_objects(path), limit)]
    answered = [row for row in rows if isinstance(row, Answered)]
    turns = [row for row in rows if isinstance(row, Turns)]
    examples = each_or_blame(
        lambda some: examples_of(template, [row.prompt for row in some], [row.response for row in some]), answered, path
    )
    marked = each_or_blame(lambda some: template.encode_turns([row.messages for row in some]), turns, path)
    by_line = dict(zip([row.line for row in answered], examples, strict=True))
    by_line |= {row.line: Example(*both) for row, both in zip(turns, marked, strict=True)}
    return assemble([Encoded(line, [by_line[line]]) for line in sorted(by_line)], path, data, template)


def _row(fields: dict[str, Any], where: str, number: int, data: SftData) -> Answered | Turns:
    if data.messages_key in fields:
        return Turns(number, _messages(fields[data.messages_key], f"{data.messages_key!r} in {where}"))
    prompt = prompt_of(column(fields, data.prompt_key, where, "data.prompt_key"), f"{data.prompt_key!r} in {where}")
    return Answered(
        number, prompt, text_of(column(fields, data.response_key, where, "data.response_key"), data.response_key, where)
    )


def text_of(value: Any, key: str, where: str) -> str:
    """An answer: a text, or a list of one message by the assistant. Raises DataError."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) and value[0].get("role") == "assistant":
        value = value[0].get("content")
    if not isinstance(value, str):
        raise DataError(f"a text, or one assistant message, in {key!r} in {where}", f"{value!r:.80}", "Fix the row.")
    return value


def _messages(value: Any, what: str) -> tuple[dict[str, Any], ...]:
    usable = isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
    )
    if not usable or len(value) < 2 or value[-1]["role"] != "assistant" or value[0]["role"] == "assistant":
        raise DataError(
            f"messages {{role, content}} that begin before an answer and end with one by the assistant in {what}",
            f"{value!r:.80}",
            "Fix the row.",
        )
    return tuple(value)
