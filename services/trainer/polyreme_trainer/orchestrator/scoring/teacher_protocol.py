"""Requests to a teacher, and its replies: OpenAI's completions over token ids. Pure.

Invariant: each number is a finite log-probability of exactly the requested token; anything else is a TeacherReplyError.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

TeacherProtocol = Literal["prompt_logprobs", "echo"]

_ROUNDING = 1e-3  # rounding may put a probability of 1 above it by this much
_IMPOSSIBLE = -9999.0  # what vLLM writes for a log-probability of minus infinity


class TeacherReplyError(Exception):
    """A reply without the requested log-probabilities. The message states what was expected and what was found."""


class TokenLogprobs(NamedTuple):
    """Log-probabilities of all ids of a request except the first, which has none: float32 [length - 1], and these ids' texts."""

    logprobs: NDArray[np.float32]
    texts: list[str]


def request(ids: Sequence[int], protocol: TeacherProtocol) -> dict[str, object]:
    """The body, without the model's name, of a request for the log-probabilities of `ids`. One token is generated and ignored."""
    asked: dict[str, object] = {"prompt_logprobs": 0} if protocol == "prompt_logprobs" else {"echo": True, "logprobs": 1}
    return {"prompt": list(ids), "max_tokens": 1, "temperature": 1.0, **asked}


def parse(reply: Any, ids: Sequence[int], protocol: TeacherProtocol) -> TokenLogprobs:
    """The log-probabilities in a reply. Raises TeacherReplyError."""
    try:
        (choice,) = reply["choices"]
    except (TypeError, KeyError, ValueError):
        raise TeacherReplyError(f"expected one choice; found {str(reply)[:200]}") from None
    pairs = _prompt_logprobs(choice, ids) if protocol == "prompt_logprobs" else _echo(choice, len(ids))
    try:
        logprobs = np.array([number if type(number) in (int, float) else np.nan for number, _ in pairs], dtype=np.float64)
    except OverflowError:
        raise TeacherReplyError(f"expected {len(ids) - 1} log-probabilities; found {str(pairs)[:200]}") from None
    wrong = ~np.isfinite(logprobs) | (logprobs > _ROUNDING) | (logprobs <= _IMPOSSIBLE)
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        raise TeacherReplyError(
            f"expected a finite log-probability of token {place + 1}, id {ids[place + 1]}; found {repr(pairs[place][0])[:200]}"
        )
    return TokenLogprobs(logprobs.astype(np.float32), [str(text) for _, text in pairs])


def model_of(listed: object, name: str | None) -> tuple[str, int | None]:
    """The name of the model to query, and its maximum length in tokens if the server reports one. Raises TeacherReplyError.

    Args:
        listed: the reply to GET /models.
        name: the configured name; None: there must be one model.
    """
    rows = listed.get("data") if isinstance(listed, Mapping) else None
    found = {str(row["id"]): row for row in rows or () if isinstance(row, Mapping) and "id" in row}
    if name is None and len(found) == 1:
        name = next(iter(found))
    if name not in found:
        raise TeacherReplyError(
            f"expected {f'the model {name}' if name else 'one model, or its name as teacher.model'}; found {sorted(found)}"
        )
    longest = found[name].get("max_model_len")
    return name, longest if isinstance(longest, int) else None


def differing(ids: Sequence[int], own: Sequence[str], theirs: Sequence[str]) -> tuple[int, str, str] | None:
    """The first id whose text differs between the vocabularies, with both texts; None when all are equal.

    Texts are compared without leading spaces, which servers write in several ways. A token for part of a character has no text.

    Raises:
        TeacherReplyError: too few ids have a text in both vocabularies to compare them.
    """
    comparable = [
        (each, mine, other)
        for each, mine, other in zip(ids, map(_bare, own), map(_bare, theirs), strict=True)
        if mine and other and "\ufffd" not in mine + other
    ]
    if 4 * len(comparable) < len([text for text in own if _bare(text) and "\ufffd" not in text]):
        raise TeacherReplyError(f"expected the texts of {len(ids)} tokens, to compare vocabularies; found {len(comparable)}")
    return next((found for found in comparable if found[1] != found[2]), None)


def _bare(text: str) -> str:
    return text.lstrip(" \u0120\u2581")


def _prompt_logprobs(choice: object, ids: Sequence[int]) -> list[tuple[object, object]]:
    rows = choice.get("prompt_logprobs") if isinstance(choice, Mapping) else None
    if not isinstance(rows, list):
        raise TeacherReplyError(
            "expected prompt_logprobs in the reply; found none. If the server has echo with logprobs, set teacher.protocol: echo"
        )
    if len(rows) != len(ids):
        raise TeacherReplyError(f"expected prompt_logprobs of {len(ids)} tokens; found {len(rows)}")
    pairs = []
    for place, (row, each) in enumerate(zip(rows[1:], ids[1:], strict=True), start=1):
        entry = row.get(str(each)) if isinstance(row, Mapping) else None
        if not isinstance(entry, Mapping) or "logprob" not in entry:
            raise TeacherReplyError(f"expected the log-probability of token {place}, id {each}; found {str(row)[:200]}")
        pairs.append((entry["logprob"], entry.get("decoded_token") or ""))
    return pairs


def _echo(choice: object, count: int) -> list[tuple[object, object]]:
    found = choice.get("logprobs") if isinstance(choice, Mapping) else None
    numbers, texts = (found.get(name) if isinstance(found, Mapping) else None for name in ("token_logprobs", "tokens"))
    if not (
        isinstance(numbers, list)
        and isinstance(texts, list)
        and len(numbers) == len(texts)
        and len(numbers) in (count, count + 1)
    ):
        raise TeacherReplyError(
            f"expected token_logprobs and tokens of the {count} tokens that were sent, and of at most one more; "
            f"found {str(found)[:200]}"
        )
    return list(zip(numbers[1:count], texts[1:count], strict=True))
