"""Supervised rows of a stage or a warm start: a prompt with its response, or messages of several turns.

Invariant: a row's text is the conversation as the template writes it, with one end token after each answer that is trained on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from polyreme.config.data import Sources, TextConfig
from polyreme.config.stage import SftData
from polyreme.dataset.chat import Answer, Chat, PromptSource, read_answer, read_chat
from polyreme.dataset.columns import value_at
from polyreme.dataset.source import read_objects
from polyreme.errors import DataError
from polyreme_trainer.data.prompts import Example, check_ids, chunks, column, each_or_blame, prompt_in, structured, tools_in
from polyreme_trainer.data.stage_rows import Encoded, StageRows, assemble, examples_of
from polyreme_trainer.data.template import Template

RESPONSE, MESSAGES = "response", "messages"
"""The columns of a warm start."""


@dataclass(frozen=True)
class Answered:
    """A prompt with its response."""

    where: str
    prompt: PromptSource
    response: Answer


@dataclass(frozen=True)
class Turns:
    """A conversation of several turns."""

    where: str
    chat: Chat


def read_supervised(sources: Sources, data: SftData, template: Template, limit: int | None = None) -> StageRows:
    """The rows of a stage.

    Args:
        limit: maximum number of rows to read; None: all.

    Raises:
        DataError: a file is missing or empty, or a row is unusable.
    """
    rows = (
        _row(fields, where, data, data.response_key, data.messages_key) for where, fields in islice(read_objects(sources), limit)
    )
    encoded = chain.from_iterable(zip(some, encode_examples(some, template), strict=True) for some in chunks(rows))
    return assemble((Encoded(row.where, [example]) for row, example in encoded), sources, data, template)


def read_examples(sources: Sources, data: TextConfig) -> Iterator[Answered | Turns]:
    """The rows of a warm start, lazily. Raises DataError."""
    return (_row(fields, where, data, RESPONSE, MESSAGES) for where, fields in read_objects(sources))


def load_examples(sources: Sources, data: TextConfig, template: Template, max_tokens: int) -> Iterator[Example]:
    """The examples of a warm start, in the order of the data. Reads lazily.

    Raises:
        DataError: a row is unusable, or has more than `max_tokens` tokens.
    """
    for rows in chunks(read_examples(sources, data)):
        yield from encode_examples(rows, template, max_tokens)


def encode_examples(rows: Sequence[Answered | Turns], template: Template, max_tokens: int | None = None) -> list[Example]:
    """The examples of rows. Raises DataError for a row that is unusable or has more than `max_tokens` tokens (None: any)."""
    answered = [row for row in rows if isinstance(row, Answered)]
    turns = [row for row in rows if isinstance(row, Turns)]
    pairs = iter(
        each_or_blame(lambda some: examples_of(template, [row.prompt for row in some], [row.response for row in some]), answered)
    )
    marked = iter(each_or_blame(lambda some: template.encode_turns([row.chat for row in some]), turns))
    examples = [next(pairs) if isinstance(row, Answered) else Example(*next(marked)) for row in rows]
    for row, example in zip(rows, examples, strict=True):
        if max_tokens is not None and len(example.ids) > max_tokens:
            raise DataError(
                f"prompt, response and end token within {max_tokens} tokens in {row.where}",
                f"{len(example.ids)}",
                "Shorten the row, or raise rollout.max_model_len.",
            )
        if max_tokens is not None:
            check_ids(example.ids, template, row.where)
    return examples


def _row(fields: Mapping[str, object], where: str, data: TextConfig, response_key: str, messages_key: str) -> Answered | Turns:
    if (messages := value_at(fields, messages_key)) is not None:
        return Turns(where, _conversation(messages, f"{messages_key!r} in {where}", tools_in(fields, data)))
    prompt, what = prompt_in(fields, where, data), f"{response_key!r} in {where}"
    response = structured(column(fields, response_key, where, "data.response_key"), what, data)
    return Answered(where, prompt, read_answer(response, what))


def _conversation(value: object, what: str, tools: object) -> Chat:
    chat = read_chat(value, what, tools)
    if len(chat.messages) < 2 or chat.messages[-1]["role"] != "assistant" or chat.messages[0]["role"] == "assistant":
        raise DataError(
            f"messages {{role, content}} that begin before an answer and end with one by the assistant in {what}",
            ", ".join(message["role"] for message in chat.messages),
            "Fix the row.",
        )
    return chat
