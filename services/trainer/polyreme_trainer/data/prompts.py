"""Reads data files into prompts for rollouts and examples for supervised training.

Invariant: prompts and examples depend only on the files, the model files and the `data` section, so an index names the same
prompt after a restart. Every token id has an embedding in the model. Every error names the file and the row.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol, TypeVar

import numpy as np
import xxhash

from polyreme.config.data import DataConfig, Sources, TextConfig
from polyreme.dataset.chat import PromptSource, plain_prompt, read_prompt
from polyreme.dataset.columns import TokenIds, column_names, label_text, value_at
from polyreme.dataset.formats import advice
from polyreme.dataset.source import as_sources, name_of, read_objects
from polyreme.dataset.strict_json import messages_of
from polyreme.dataset.text_files import Fields
from polyreme.errors import DataError
from polyreme_trainer.data.prompt_store import Prompt, PromptStore
from polyreme_trainer.data.template import Template

logger = logging.getLogger(__name__)

_CHUNK = 256
"""Number of rows that are encoded together."""
_MISSING = object()


class Located(Protocol):
    """The content of a row. `where` names file and row in errors."""

    @property
    def where(self) -> str: ...


Result = TypeVar("Result")
Source = TypeVar("Source", bound=Located)
Item = TypeVar("Item")


@dataclass(frozen=True)
class DatasetRow:
    """One row of a data file. `metadata` has every column except the label.

    Attributes:
        label: the reference answer; '' where there is none.
        has_column: whether the row has the label's column. Of several turns it has earlier answers, and no label.
    """

    where: str
    prompt: PromptSource
    label: str | TokenIds
    metadata: Fields
    has_column: bool = True


@dataclass(frozen=True)
class Dataset:
    """Usable prompts in the order of the data.

    Attributes:
        filtered: number of prompts omitted because they are too long.
        duplicates: number of prompts omitted because an earlier one has the same text.
        unlabelled: number of rows without a reference answer, if others have one.
        sizes: number of usable prompts of each source.
    """

    prompts: Sequence[Prompt]
    filtered: int = 0
    duplicates: int = 0
    unlabelled: int = 0
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Example:
    """A supervised sequence: `ids` int32 [t] is prompt, response and end token; `loss_mask` uint8 [t] is 1 after the prompt."""

    ids: np.ndarray
    loss_mask: np.ndarray


@dataclass
class LabelCount:
    """The reference answers of some data. `columns` are those of the first row."""

    rows: int = 0
    labelled: int = 0
    with_column: int = 0
    columns: Sequence[str] = ()

    def add(self, rows: Sequence[DatasetRow]) -> None:
        for row in rows:
            self.columns = self.columns or column_names(row.metadata)
            self.rows, self.labelled = self.rows + 1, self.labelled + (len(row.label) > 0)
            self.with_column += row.has_column

    @property
    def unlabelled(self) -> int:
        """The number of rows without a reference answer, if others have one."""
        return self.rows - self.labelled if self.labelled else 0

    def check(self, sources: Sources, data: DataConfig) -> None:
        """Raises DataError when no row has the column that `data.label_key` names. Its default may be absent."""
        if self.rows and not self.with_column and data.label_key != DataConfig.model_fields["label_key"].default:
            raise DataError(
                f"the column data.label_key = {data.label_key!r} in the rows of {name_of(sources)}",
                f"none of {self.rows} rows with it; the columns are {', '.join(self.columns)}",
                "Fix data.label_key, or remove it for data without reference answers.",
            )


def read_rows(sources: Sources, data: DataConfig) -> Iterator[DatasetRow]:
    """The rows of the data. Reads lazily.

    Raises:
        DataError: a file is missing or empty, or a row is unusable.
    """
    for where, fields in read_objects(sources):
        yield _row(fields, where, data)


def load_prompts(sources: Sources, data: DataConfig, template: Template) -> Dataset:
    """Reads, renders and encodes prompts. Prompts beyond `max_prompt_tokens` are omitted and counted.

    Raises:
        DataError: a row is unusable, a prompt is too long under `overlong: error`, no prompt of a source is usable, or no row has
            the column that `data.label_key` names.
    """
    store, seen, sizes, labels = PromptStore(), set[int](), list[int](), LabelCount()
    filtered = duplicates = 0
    for source in as_sources(sources):
        before = len(store)
        for chunk in chunks(read_rows((source,), data)):
            encoded = encode_prompts(chunk, data, template)
            labels.add(chunk)
            filtered += encoded.filtered
            for prompt in encoded.prompts:
                if data.deduplicate:
                    digest = xxhash.xxh3_128_intdigest(prompt.text.encode())
                    if digest in seen:
                        duplicates += 1
                        continue
                    seen.add(digest)
                store.append(prompt)
        if len(store) == before:
            raise none_usable((source,), data, filtered, duplicates)
        sizes.append(len(store) - before)
    labels.check(sources, data)
    if labels.unlabelled:
        logger.warning("%s: %d of %d rows have no reference answer", name_of(sources), labels.unlabelled, labels.rows)
    for count, reason in ((filtered, f"are longer than {data.max_prompt_tokens} tokens"), (duplicates, "repeat an earlier one")):
        if count:
            total = len(store) + filtered + duplicates
            logger.warning("%s: %d of %d prompts %s and are left out", name_of(sources), count, total, reason)
    return Dataset(store, filtered, duplicates, labels.unlabelled, tuple(sizes))


def encode_prompts(rows: Sequence[DatasetRow], data: DataConfig, template: Template) -> Dataset:
    """The prompts of rows. Raises DataError for an unusable row, or one that is too long under `overlong: error`."""
    texts = each_or_blame(lambda some: template.render([row.prompt for row in some]), rows)
    prompts, filtered = [], 0
    for row, text, encoded in zip(rows, texts, template.encode_prompts(texts), strict=True):
        given = isinstance(row.prompt, TokenIds)
        ids = np.array(row.prompt, dtype=np.int32) if given else encoded
        if len(ids) == 0:
            raise DataError(f"a prompt with tokens in {row.where}", "an empty one", "Remove or fill the row.")
        if len(ids) <= data.max_prompt_tokens:
            check_ids(ids, template, row.where)
            metadata = json.dumps(row.metadata, ensure_ascii=False)
            label = row.label if isinstance(row.label, str) else template.decode([row.label], special=False)[0]
            prompts.append(Prompt(ids, text, label, metadata, text if given else plain_prompt(row.prompt)))
        elif data.overlong == "error":
            raise DataError(
                f"at most data.max_prompt_tokens = {data.max_prompt_tokens} tokens in {row.where}",
                f"{len(ids)}",
                "Raise data.max_prompt_tokens, shorten the prompt, or set data.overlong: filter.",
            )
        else:
            filtered += 1
    return Dataset(prompts, filtered)


def none_usable(sources: Sources, data: DataConfig, filtered: int, duplicates: int = 0) -> DataError:
    """The error for data without a usable prompt."""
    if duplicates and not filtered:
        return DataError(
            f"a prompt in {name_of(sources)} that no earlier source has, since data.deduplicate is set",
            f"{duplicates} repeated ones",
            "Remove the source, or set data.deduplicate to false.",
        )
    return DataError(
        f"prompts of at most data.max_prompt_tokens = {data.max_prompt_tokens} tokens in {name_of(sources)}",
        f"{filtered} longer and {duplicates} repeated ones" if duplicates else f"{filtered}, all longer",
        "Raise data.max_prompt_tokens, or remove the source.",
    )


def chunks(rows: Iterator[Item]) -> Iterator[list[Item]]:
    """Yields lists of rows that are encoded together."""
    while chunk := list(islice(rows, _CHUNK)):
        yield chunk


def check_ids(ids: np.ndarray, template: Template, where: str) -> None:
    """Raises DataError for ids without an embedding: their losses and gradients would be meaningless."""
    if (highest := int(ids.max(initial=0))) >= template.embeddings:
        raise DataError(
            f"token ids below the model's {template.embeddings} embeddings (vocab_size in config.json) in {where}",
            f"id {highest}, from a tokenizer with {template.tokens} tokens",
            "Use the tokenizer that belongs to the model, or resize the model's embeddings.",
        )


def each_or_blame(apply: Callable[[Sequence[Source]], list[Result]], rows: Sequence[Source]) -> list[Result]:
    """Applies `apply` to all rows at once, if there are any. When that fails, raises a DataError that names the first bad row."""
    try:
        return apply(rows) if rows else []
    except DataError:
        for row in rows:
            try:
                apply([row])
            except DataError as error:
                raise DataError(f"{error.expected} in {row.where}", error.found, error.do) from error
        raise


def _row(fields: Mapping[str, object], where: str, data: DataConfig) -> DatasetRow:
    answer, source = value_at(fields, data.label_key), prompt_in(fields, where, data)
    if _with_history(value_at(fields, data.prompt_key), answer) is not None:
        answer = None
    label = answer if isinstance(answer, TokenIds) else _text(answer, f"{data.label_key!r} in {where}")
    # The prompt and the tools are kept, since a reward model renders them with its own template.
    metadata = {key: value for key, value in fields.items() if key != data.label_key and not isinstance(value, TokenIds)}
    return DatasetRow(where, source, label, metadata, value_at(fields, data.label_key) is not None)


def prompt_in(fields: Mapping[str, object], where: str, data: TextConfig) -> PromptSource:
    """The prompt of a row, with its tools. Raises DataError."""
    prompt = column(fields, data.prompt_key, where, "data.prompt_key")
    if isinstance(data, DataConfig) and (turns := _with_history(prompt, value_at(fields, data.label_key))) is not None:
        prompt = turns
    what = f"{data.prompt_key!r} in {where}"
    return read_prompt(structured(prompt, what, data), what, tools_in(fields, data))


def structured(value: object, what: str, data: TextConfig) -> object:
    """The messages of a JSON text, for a template of messages; another value as it is. Raises DataError."""
    return value if data.template == "none" else messages_of(value, what)


def tools_in(fields: Mapping[str, object], data: TextConfig) -> object:
    """The tools of a row as its column has them; None for a template without messages, whose texts are complete."""
    return None if data.tools_key is None or data.template == "none" else value_at(fields, data.tools_key)


def _with_history(prompt: object, answers: object) -> list[dict[str, str]] | None:
    """PaddleNLP's form of several turns as messages: the user's n texts with the n - 1 answers between them."""
    if not isinstance(prompt, list) or not isinstance(answers, list) or not len(prompt) == len(answers) + 1 > 1:
        return None
    if not all(isinstance(text, str) for text in (*prompt, *answers)):
        return None
    turns = [
        {"role": role, "content": text}
        for both in zip(prompt, answers, strict=False)
        for role, text in zip(("user", "assistant"), both, strict=True)
    ]
    return [*turns, {"role": "user", "content": prompt[-1]}]


def column(fields: Mapping[str, object], key: str, where: str, setting: str) -> object:
    """A required column, by name or dotted path; `setting` names it in the configuration. Raises DataError."""
    value = value_at(fields, key, _MISSING)
    if value is _MISSING:
        do = f"Fix the row, or {setting}.{advice(fields, key, where)}"
        raise DataError(f"a column {key!r} in {where}", f"columns {column_names(fields)}", do)
    return value


def _text(value: object, what: str) -> str:
    try:
        return label_text(value)
    except TypeError as error:
        raise DataError(f"a text or number in {what}", str(error), "Fix the row, or data.label_key.") from None
