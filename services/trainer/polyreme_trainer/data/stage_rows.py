"""Rows of a stage as token sequences, in the order of their file.

Invariant: a row keeps all its sequences or is omitted; omitted rows are counted. The sequences are on disk, see `token_store`.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash
from numpy.typing import NDArray

from polyreme.config.data import Sources
from polyreme.config.stage import ConversationData
from polyreme.dataset.chat import Answer, PromptSource
from polyreme.dataset.source import name_of
from polyreme.errors import DataError
from polyreme_trainer.data.prompts import Example, check_ids
from polyreme_trainer.data.template import Template
from polyreme_trainer.data.token_store import TokenStore


@dataclass(frozen=True)
class StageRows:
    """n rows of `width` sequences each. Those of row i start at `width * i`; the chosen one of a pair is first.

    Attributes:
        ids: int32 [L] each.
        loss_mask: uint8 [L] each, 1 where the token is trained on. A value head reads whole sequences and ignores it.
        width: number of sequences of a row.
        columns: further numbers of each row by name, float32 [n].
        left_out: number of omitted rows of the file, by reason.
    """

    ids: Sequence[NDArray[np.int32]]
    loss_mask: Sequence[NDArray[np.uint8]]
    width: int = 1
    columns: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids) // self.width

    def take(self, rows: NDArray[np.int64]) -> "StageRows":
        """These rows, in this order."""
        places = (rows[:, None] * self.width + np.arange(self.width)).ravel()
        columns = {name: values[rows] for name, values in self.columns.items()}
        return StageRows([self.ids[i] for i in places], [self.loss_mask[i] for i in places], self.width, columns)

    def digest(self) -> str:
        """xxh3_64 of all rows, hexadecimal."""
        digest = xxhash.xxh3_64()
        for ids, mask in zip(self.ids, self.loss_mask, strict=True):
            digest.update(len(ids).to_bytes(8, "little") + ids.tobytes() + mask.tobytes())
        for name, values in sorted(self.columns.items()):
            digest.update(name.encode() + values.tobytes())
        return digest.hexdigest()


def mismatched(rows: StageRows, chosen: Iterable[int], longest: int) -> StageRows:
    """Pairs the prompt of each row `chosen` with the next row's answer (the last with the first), cut to `longest` tokens.

    From these mismatched pairs, KTO estimates the KL of the policy to the reference.
    """
    ids: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.uint8]] = []
    for row in chosen:
        other = (row + 1) % len(rows)
        start, of_other = (int(np.argmax(rows.loss_mask[each])) for each in (row, other))
        ids.append(np.concatenate([rows.ids[row][:start], rows.ids[other][of_other:]])[:longest])
        masks.append((np.arange(len(ids[-1])) >= start).astype(np.uint8))
    return StageRows(ids, masks)


@dataclass(frozen=True)
class Encoded:
    """One row: its sequences and its numbers."""

    where: str
    sequences: Sequence[Example]
    columns: Mapping[str, float] = field(default_factory=dict)


def assemble(
    rows: Iterable[Encoded],
    sources: Sources,
    data: ConversationData,
    template: Template,
    left_out: Mapping[str, int] | None = None,
) -> StageRows:
    """The rows within `data.max_tokens`. Reads `rows` once and keeps none of them in memory.

    Args:
        left_out: number of rows that the reader omitted, by reason; complete when `rows` has ended.

    Raises:
        DataError: a row is too long under `overlong: error`, has ids without an embedding, or no row is left.
    """
    store, width, kept, overlong = TokenStore(), 1, 0, 0
    columns: dict[str, array[float]] = {}
    for row in rows:
        where, longest = row.where, max(len(each.ids) for each in row.sequences)
        if longest <= data.max_tokens:
            for each in row.sequences:
                check_ids(each.ids, template, where)
                store.append(each.ids, each.loss_mask)
            for name, value in row.columns.items():
                columns.setdefault(name, array("f")).append(value)
            width, kept = len(row.sequences), kept + 1
        elif data.overlong == "error":
            raise DataError(
                f"at most data.max_tokens = {data.max_tokens} tokens in {where}",
                f"{longest}",
                "Raise data.max_tokens, shorten the row, or set data.overlong: filter.",
            )
        else:
            overlong += 1
    missing = {**(left_out or {}), f"longer than data.max_tokens = {data.max_tokens}": overlong}
    missing = {reason: count for reason, count in missing.items() if count}
    if not kept:
        found = ", ".join(f"{count} {reason}" for reason, count in missing.items())
        raise DataError(f"rows to train on in {name_of(sources)}", found or "none", "Fix the file, or the section data.")
    numbers = {name: np.array(values, dtype=np.float32) for name, values in columns.items()}
    return StageRows(*store.close(), width, numbers, missing)


def examples_of(template: Template, prompts: Sequence[PromptSource], responses: Sequence[Answer]) -> list[Example]:
    """Each prompt with its response as the template formats them. The response and end token are trained on. Raises DataError."""
    examples = []
    for ids, start in template.encode_conversations(template.converse(prompts, responses)):
        mask = np.zeros(len(ids), dtype=np.uint8)
        mask[start:] = 1
        examples.append(Example(ids, mask))
    return examples
