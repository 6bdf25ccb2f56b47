"""Supervised rows of a stage: a prompt with its response, or messages of several turns.

Invariant: a row's text is the conversation as the chat template writes it, with one end token after each answer that is trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from polyreme.config.data import Sources
from polyreme.config.stage import SftData
from polyreme.dataset.columns import chat_messages, value_at
from polyreme.dataset.source import read_objects
from polyreme.errors import DataError
from polyreme_trainer.data.prompts import Example, chunks, column, each_or_blame, prompt_of
from polyreme_trainer.data.stage_rows import Encoded, StageRows, assemble, examples_of
from polyreme_trainer.data.template import PromptSource, Template


@dataclass(frozen=True)
class Answered:
    """A prompt with its response."""

    where: str
    prompt: PromptSource
    response: str


@dataclass(frozen=True)
class Turns:
    """A conversation of several turns."""

    where: str
    messages: tuple[dict[str, Any], ...]


def read_supervised(sources: Sources, data: SftData, template: Template, limit: int | None = None) -> StageRows:
    """The rows of the data.

    Args:
        limit: maximum number of rows to read; None: all.

    Raises:
        DataError: a file is missing or empty, or a row is unusable.
    """
    rows = (_row(fields, where, data) for where, fields in islice(read_objects(sources), limit))
    return assemble(chain.from_iterable(_encode(some, template) for some in chunks(rows)), sources, data, template)


def _encode(rows: Sequence[Answered | Turns], template: Template) -> list[Encoded]:
    answered = [row for row in rows if isinstance(row, Answered)]
    turns = [row for row in rows if isinstance(row, Turns)]
    examples = iter(
        each_or_blame(lambda some: examples_of(template, [row.prompt for row in some], [row.response for row in some]), answered)
    )
    marked = iter(each_or_blame(lambda some: template.encode_turns([row.messages for row in some]), turns))
    return [Encoded(row.where, [next(examples) if isinstance(row, Answered) else Example(*next(marked))]) for row in rows]


def _row(fields: dict[str, Any], where: str, data: SftData) -> Answered | Turns:
    if (messages := value_at(fields, data.messages_key)) is not None:
        return Turns(where, _messages(messages, f"{data.messages_key!r} in {where}"))
    prompt = prompt_of(column(fields, data.prompt_key, where, "data.prompt_key"), f"{data.prompt_key!r} in {where}")
    return Answered(
        where, prompt, text_of(column(fields, data.response_key, where, "data.response_key"), data.response_key, where)
    )


def text_of(value: Any, key: str, where: str) -> str:
    """An answer: a text, a list with one text (PaddleNLP's `tgt`), or a list of one message by the assistant. Raises DataError."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) and value[0].get("role") == "assistant":
        value = value[0].get("content")
    if not isinstance(value, str):
        raise DataError(f"a text, or one assistant message, in {key!r} in {where}", f"{value!r:.80}", "Fix the row.")
    return value


def _messages(value: Any, what: str) -> tuple[dict[str, Any], ...]:
    value = chat_messages(value)
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
