"""The question to a reward and its answer. Invariant: a value exists only with Status.OK, and then it is finite."""

import json
import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol


class Item(NamedTuple):
    """One response to be scored.

    Args:
        key: names this exact question for retries; empty: never remembered.
        prompt: the prompt as plain text, as it stands in the row: of chat messages, the last one by the user.
        response: as text without special tokens.
        response_raw: as text with special tokens; may be empty when only the clean text is known.
        label: the reference answer; may be empty.
        metadata_json: a JSON object with the row's other columns, or empty.
        templated_prompt: the text that the model saw, chat template and special tokens included; empty when only `prompt` is known.
        token_ids: of the response's tokens, stop token included; empty when only texts are known.
        token_texts: the text of each token; together they are `response_raw`.
    """

    key: str
    prompt: str
    response: str
    response_raw: str = ""
    label: str = ""
    metadata_json: str = ""
    templated_prompt: str = ""
    token_ids: Sequence[int] = ()
    token_texts: Sequence[str] = ()

    @property
    def metadata(self) -> dict[str, Any]:
        """The row's other columns. Raises RewardError when they are no JSON object."""
        if not self.metadata_json:
            return {}
        try:
            found = json.loads(self.metadata_json)
        except (ValueError, RecursionError) as error:
            raise RewardError(f"expected metadata_json to be a JSON object; found {error}") from None
        if not isinstance(found, dict):
            raise RewardError(f"expected metadata_json to be a JSON object; found a {type(found).__name__}")
        return found

    @property
    def seen(self) -> str:
        """The prompt as the model saw it where that is known, else as plain text."""
        return self.templated_prompt or self.prompt

    @property
    def raw(self) -> str:
        """The response with special tokens where it is known, else without."""
        return self.response_raw or self.response


class Status(IntEnum):
    """How scoring an item ended; the numbers are those of ScoreStatus in the proto."""

    OK = 1
    ERROR = 2
    TIMEOUT = 3
    INVALID = 4


class Outcome(NamedTuple):
    """One reward's answer to one item.

    Args:
        extras: further named numbers, reported and not summed.
        token_rewards: one number per token of the item; empty where the reward gave none. They are a part of `value`: what it has beyond
            their sum belongs to the last token.
    """

    status: Status
    value: float = 0.0
    message: str = ""
    extras: Mapping[str, float] = {}
    token_rewards: tuple[float, ...] = ()


class RewardError(Exception):
    """A reward cannot score this item; the message says what was expected and what was found."""


NO_LABEL = "expected a label to compare with; found none"
"""Begins the message of every item that fails because it has no label."""
NO_TOKENS = "expected the response's tokens, for a reward that reads them; found texts alone"

MESSAGE_LIMIT = 2000
EXTRAS_LIMIT = 32
_LARGEST = 3.4028234663852886e38  # of float32, in which the experience log keeps rewards per token


def ok(value: float) -> Outcome:
    return Outcome(Status.OK, value)


def failed(status: Status, message: str) -> Outcome:
    text = printable(message)
    return Outcome(status, message=text if len(text) <= MESSAGE_LIMIT else text[:MESSAGE_LIMIT] + " ...")


def printable(text: str) -> str:
    """The text without lone surrogates, which neither protobuf nor UTF-8 can carry."""
    return text.encode("utf-8", "replace").decode()


def judge(answer: object, tokens: int = 0) -> Outcome:
    """The outcome of a reward's return value.

    Args:
        answer: a number; a list of one number per token, whose sum is the value; or a mapping with `score`, which is either, and further
            numbers. A mapping may also have `token_rewards` beside a number as `score`, or alone.
        tokens: of the item; 0: it came without its tokens, so a list is no answer.
    """
    extras: dict[str, float] = {}
    per_token: object = None
    if isinstance(answer, Mapping):
        per_token = answer.get("token_rewards")
        if "score" not in answer and per_token is None:
            return failed(Status.INVALID, f"expected a mapping with the key 'score'; found the keys {_shown(list(answer))}")
        for name, value in list(answer.items())[: EXTRAS_LIMIT + 1]:
            number = _number(value)
            if name not in ("score", "token_rewards") and number is not None and math.isfinite(number):
                extras[printable(str(name)[:100])] = number
        answer = answer.get("score")
    if per_token is None and _is_list(answer):
        per_token, answer = answer, None
    if per_token is not None:
        numbers = _per_token(per_token, tokens)
        if isinstance(numbers, str):
            return failed(Status.INVALID, numbers)
        value = _number(math.fsum(numbers) if answer is None else answer)
        if value is not None and math.isfinite(value):
            return Outcome(Status.OK, value, "", extras, numbers)
    number = _number(answer)
    if number is None:
        return failed(Status.INVALID, f"expected a finite number; found {_shown(answer)}")
    if not math.isfinite(number):
        return failed(Status.INVALID, f"expected a finite number; found {number}")
    return Outcome(Status.OK, number, "", extras)


def _number(value: object) -> float | None:
    """A Python or NumPy-like number as a float; None for anything else."""
    if isinstance(value, str | bytes | bytearray) or not hasattr(type(value), "__float__"):
        return None
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _is_list(value: object) -> bool:
    """Whether it is a list, or an array or tensor of one dimension and more than one number."""
    return isinstance(value, list | tuple) or (
        getattr(value, "ndim", 0) == 1 and hasattr(value, "tolist") and _length(value) != 1
    )


def _length(value: object) -> int | None:
    try:
        return len(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _per_token(value: object, tokens: int) -> tuple[float, ...] | str:
    """One finite number per token, or what was expected and found instead."""
    if not tokens:
        return f"expected one number, since no tokens came with the item or over its wire; found {_shown(value)}"
    if (length := _length(value)) != tokens or isinstance(value, str | bytes | Mapping):
        return f"expected {tokens} numbers, one per token; found {_shown(value) if length is None else length}"
    listed = value.tolist() if hasattr(value, "tolist") else value
    numbers = []
    for place, each in enumerate(listed):  # type: ignore[arg-type]
        number = _number(each)
        if number is None or not abs(number) <= _LARGEST:
            return f"expected a finite float32 for every token; found {_shown(each)} for token {place}"
        numbers.append(number)
    return tuple(numbers)


def _shown(value: object) -> str:
    text = repr(value[:200] if isinstance(value, str | bytes | list | tuple) else value)
    return f"{text[:200]} ({type(value).__name__})"


class Reward(Protocol):
    """A reward that is ready to score."""

    @property
    def name(self) -> str:
        """The name of its part of a score."""
        ...

    @property
    def weight(self) -> float:
        """The factor of its value in the score."""
        ...

    @property
    def version(self) -> str:
        """Changes whenever its scores may change."""
        ...

    @property
    def description(self) -> str:
        """One line for readers."""
        ...

    @property
    def correctness(self) -> bool:
        """Whether a value is 1 for a right answer and 0 for a wrong one, so that a mean of values is an accuracy."""
        ...

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads an item's tokens, which clients leave out where no reward does."""
        ...

    @property
    def available(self) -> bool:
        """Whether it can score now, as far as is known."""
        ...

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """One outcome per item, in order. Never raises for what an item or plugin does."""
        ...
