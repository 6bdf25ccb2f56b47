"""A report on data under a configuration: lengths, omitted rows, repetitions, and rows shared with other data.

Invariant: every row is read, rendered and encoded as in training. Rows themselves are not kept, only their lengths and digests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import xxhash

from polyreme.config.data import DataConfig, Sources
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.dataset.chat import Message, with_tools
from polyreme.dataset.columns import TokenIds, value_at
from polyreme.dataset.source import ALLOWED_TOOLS, read_objects
from polyreme_trainer.data.prompts import DatasetRow, Example, LabelCount, chunks, encode_prompts, read_rows
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.supervised import MESSAGES, RESPONSE, encode_examples, read_examples
from polyreme_trainer.data.template import Template

Read = Callable[[Sources, object, Template, int | None], StageRows]
"""Reads the rows of a stage, given its configuration and the number of rows to read (None: all)."""

_ALL = 1 << 30
"""A token limit that no row reaches, so that overlong rows are also measured."""


@dataclass
class Report:
    """Facts about the rows of some data.

    Attributes:
        lengths: number of tokens of each row; for a pair, of its longer sequence.
        limit: maximum number of tokens in training.
        digests: the row by the digest of its tokens.
        prompts: the row by the digest of the tokens before the first trained one.
        repeated: rows with the tokens of an earlier row, each with that row.
        unlabelled: rows of a run without a reference answer; None for data without such a column.
        left_out: number of rows that a stage omits for reasons other than their length, by reason.
        example: the first row's sequences.
        tools: names of the tools that the example declares, beside those of its row; None for a run without.
    """

    limit: int
    lengths: list[int] = field(default_factory=list)
    digests: dict[int, str] = field(default_factory=dict)
    prompts: dict[int, str] = field(default_factory=dict)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    unlabelled: int | None = None
    left_out: dict[str, int] = field(default_factory=dict)
    example: Sequence[Example] = ()
    tools: Sequence[str] | None = None

    def add(self, where: str, sequences: Sequence[Example]) -> None:
        """Counts a row."""
        self.lengths.append(max(len(each.ids) for each in sequences))
        digest = xxhash.xxh3_128_intdigest(b"|".join(each.ids.tobytes() for each in sequences))
        first = sequences[0]
        before = first.ids[: int(first.loss_mask.argmax())] if first.loss_mask.any() else first.ids
        self.prompts.setdefault(xxhash.xxh3_128_intdigest(before.tobytes()) if len(before) else digest, where)
        if digest in self.digests:
            self.repeated.append((where, self.digests[digest]))
        else:
            self.digests[digest] = where
        self.example = self.example or sequences

    @property
    def overlong(self) -> int:
        return sum(length > self.limit for length in self.lengths)

    def shared_with(self, other: "Report") -> list[tuple[str, str]]:
        """The rows whose prompts are also in the other data, each with the other's row."""
        return [(where, other.prompts[digest]) for digest, where in self.prompts.items() if digest in other.prompts]


def are_examples(sources: Sources, data: DataConfig) -> bool:
    """Whether the first row of data that the configuration may not name is one of a warm start. Raises DataError."""
    first = next(read_objects(sources)).fields
    return RESPONSE in first or (MESSAGES in first and value_at(first, data.prompt_key) is None)


def report_examples(sources: Sources, config: RunConfig, template: Template) -> Report:
    """Reports on the examples of a run's warm start. Raises DataError."""
    found = Report(config.rollout.max_model_len)
    for examples in chunks(read_examples(sources, config.data)):
        for each, example in zip(examples, encode_examples(examples, template, _ALL), strict=True):
            found.add(each.where, [example])
    return found


def report_prompts(
    sources: Sources, config: RunConfig, template: Template, declared: Mapping[str, Message] | None = None
) -> Report:
    """Reports on the prompts of a run.

    Args:
        declared: the tools, by name, that an episode also declares. Lengths are without them, as their limit is. None: no tools.

    Raises:
        DataError: a row is unusable.
    """
    found, data = Report(config.data.max_prompt_tokens, unlabelled=0), config.data.model_copy(update={"max_prompt_tokens": _ALL})
    labels = LabelCount()
    for rows in chunks(read_rows(sources, data)):
        labels.add(rows)
        if declared is not None and found.tools is None:
            found.example, found.tools = _with_tools(rows[0], declared, data, template)
        for row, prompt in zip(rows, encode_prompts(rows, data, template).prompts, strict=True):
            found.add(row.where, [Example(prompt.ids, np.zeros(len(prompt.ids), dtype=np.uint8))])
    labels.check(sources, data)
    found.unlabelled = labels.rows - labels.labelled
    return found


def _with_tools(
    row: DatasetRow, declared: Mapping[str, Message], data: DataConfig, template: Template
) -> tuple[Sequence[Example], Sequence[str]]:
    """The row's prompt as the first turn of its episode has it, and the tools that it declares."""
    names = [name for name in declared if name in row.metadata.get(ALLOWED_TOOLS, declared)]
    if names and not isinstance(row.prompt, TokenIds):
        row = replace(row, prompt=with_tools(row.prompt, [declared[name] for name in names]))
    (prompt,) = encode_prompts([row], data, template).prompts
    return [Example(prompt.ids, np.zeros(len(prompt.ids), dtype=np.uint8))], names


def report_rows(sources: Sources, config: StageConfig, template: Template, read: Read) -> Report:
    """Reports on the rows of a stage, which `read` reads. Raises DataError."""
    data = config.data.model_copy(update={"max_tokens": _ALL})
    rows = read(sources, config.model_copy(update={"data": data}), template, None)
    found = Report(config.data.max_tokens, left_out=dict(rows.left_out))
    for place in range(len(rows)):
        parts = range(place * rows.width, (place + 1) * rows.width)
        found.add(f"row {place + 1}", [Example(rows.ids[part], rows.loss_mask[part]) for part in parts])
    return found
