"""Queries for samples in an index.

Invariant: a query changes nothing. A text matches anywhere in a prompt, label or response, ignoring ASCII case.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Sample = dict[str, Any]
"""A sample as JSON values: the columns of the index, and for a single sample also the fields of its line in the run's file."""

ORDERS = {
    "newest": "step DESC, number",
    "oldest": "step, number",
    "prompts": 'step, row_number() OVER (PARTITION BY step, "group" ORDER BY number), number',
    "score": "score, step DESC",
    "-score": "score DESC, step DESC",
    "tokens": "tokens, step DESC",
    "-tokens": "tokens DESC, step DESC",
    "advantage": "advantage, step DESC",
    "-advantage": "advantage DESC, step DESC",
    "logprob": "logprob, step DESC",
}
"""The orders of a list of samples; with the prefix "-", descending. prompts: one sample of each prompt, then a second one of
each, and so on."""

_FIELDS = (
    's.number, s.id, s.kind, s.step, s."group", s.position, s.prompt AS prompt_number, p.prompt, p.label, s.score, s.tokens,'
    " s.finish, s.oldest, s.newest, s.replica, s.advantage, s.logprob, s.response"
)


_CONTAINS = "instr(lower({}), lower(?))"  # LIKE takes no long pattern
_IN_PROMPT = f"{_CONTAINS.format('prompt')} OR {_CONTAINS.format('label')}"


@dataclass(frozen=True)
class SampleQuery:
    """Filters and order of a query. None and "" exclude nothing.

    Attributes:
        kind: "train" for trained samples, "eval" for answers in evaluations.
        first, last: bounds of the iteration or version, inclusive.
        score_min, score_max, tokens_min, tokens_max: inclusive bounds.
        finish: "stop" or "length".
        prompt: number of a prompt in the index.
        text: part of the prompt, label or response.
        order: one of ORDERS.
    """

    kind: str = ""
    first: int | None = None
    last: int | None = None
    score_min: float | None = None
    score_max: float | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    finish: str = ""
    prompt: int | None = None
    text: str = ""
    order: str = "newest"

    def where(self) -> tuple[str, list[object]]:
        """The SQL condition and its arguments."""
        bounds = (
            ("kind = ?", self.kind or None),
            ("step >= ?", self.first),
            ("step <= ?", self.last),
            ("score >= ?", self.score_min),
            ("score <= ?", self.score_max),
            ("tokens >= ?", self.tokens_min),
            ("tokens <= ?", self.tokens_max),
            ("finish = ?", self.finish or None),
            ("prompt = ?", self.prompt),
        )
        terms, values = ["1"], list[object]()
        for term, value in bounds:
            if value is not None:
                terms.append(term)
                values.append(value)
        if self.text:
            terms.append(f"({_CONTAINS.format('response')} OR prompt IN (SELECT id FROM prompt WHERE {_IN_PROMPT}))")
            values += [self.text] * 3
        return " AND ".join(terms), values


Range = tuple[float | None, float | None]
"""Both ends are included; None: no bound."""
EVERYTHING: Range = (None, None)


def parse_range(text: str) -> Range:
    """A range from "5", "3:10", "3:" or ":10". Raises ValueError."""
    low, colon, high = text.partition(":")
    bounds = [float(bound) if bound or not colon else None for bound in (low, high if colon else low)]
    if not all(bound is None or abs(bound) < 2**53 for bound in bounds):  # nor is NaN a bound
        raise ValueError(text)
    return bounds[0], bounds[1]


def sample_query(kind: str, iterations: Range, score: Range, tokens: Range, text: str, order: str = "oldest") -> SampleQuery:
    """The query for samples in these ranges."""

    def whole(bound: float | None) -> int | None:
        return None if bound is None else int(bound)

    return SampleQuery(
        kind=kind,
        first=whole(iterations[0]),
        last=whole(iterations[1]),
        score_min=score[0],
        score_max=score[1],
        tokens_min=whole(tokens[0]),
        tokens_max=whole(tokens[1]),
        text=text,
        order=order,
    )


def find(connection: sqlite3.Connection, wanted: SampleQuery, offset: int, limit: int) -> tuple[int, list[Sample]]:
    """The number of matching samples, and `limit` of them from `offset` on."""
    where, values = wanted.where()
    order = ORDERS.get(wanted.order, ORDERS["newest"])
    (total,) = connection.execute(f"SELECT count(*) FROM sample WHERE {where}", values).fetchone()
    query = f"SELECT number FROM sample WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
    return total, rows(connection, [number for (number,) in connection.execute(query, [*values, limit, offset])])


def places(connection: sqlite3.Connection, wanted: SampleQuery) -> Iterator[tuple[str, int, int]]:
    """File, byte offset and size of the line of each matching sample, in order."""
    where, values = wanted.where()
    query = f"SELECT file, start, size FROM sample WHERE {where} ORDER BY {ORDERS[wanted.order]}"
    yield from map(tuple, connection.execute(query, values))


def newest_step(connection: sqlite3.Connection, kind: str) -> int | None:
    """The newest iteration, of answers in evaluations the newest version, that has samples; None without any."""
    (found,) = connection.execute("SELECT max(step) FROM sample WHERE kind = ?", [kind]).fetchone()
    return None if found is None else int(found)


def rows(connection: sqlite3.Connection, numbers: Sequence[int]) -> list[Sample]:
    """The samples of these rows, in the order of `numbers`."""
    query = f"SELECT {_FIELDS} FROM sample s JOIN prompt p ON p.id = s.prompt WHERE s.number = ?"
    return [dict(connection.execute(query, [number]).fetchone()) for number in numbers]


def place(connection: sqlite3.Connection, sample_id: str) -> tuple[int, str, int, int] | None:
    """Row, file, byte offset and size of a sample's line; None without such a sample."""
    found = connection.execute("SELECT number, file, start, size FROM sample WHERE id = ?", [sample_id]).fetchone()
    return tuple(found) if found else None
