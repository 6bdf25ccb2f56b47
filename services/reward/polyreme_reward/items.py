"""The input and the output of a reward.

Invariant: only Status.OK has a value, and that value is finite.
"""

import json
import math
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol


class Item(NamedTuple):
    """One response to score.

    Args:
        key: identifies this exact item for retries; '': the answer is not cached.
        prompt: the row's prompt as plain text; for chat messages, the last user message.
        response: text without special tokens.
        response_raw: text with special tokens, or '' when it is unknown.
        label: the reference answer, or None when the row has none. An empty text is none, too.
        metadata_json: a JSON object with the row's other columns, or ''.
        templated_prompt: the prompt as the model saw it, including chat template and special tokens, or '' when it is unknown.
        token_ids: ids of the response's tokens, including the stop token; empty when only texts are known.
        token_texts: the text of each token; concatenated, they are `response_raw`.
        messages_json: an episode's conversation, whose last answer is the response: a JSON list; or '' for a single response.
    """

    key: str
    prompt: str
    response: str
    response_raw: str = ""
    label: str | None = None
    metadata_json: str = ""
    templated_prompt: str = ""
    token_ids: Sequence[int] = ()
    token_texts: Sequence[str] = ()
    messages_json: str = ""

    @property
    def messages(self) -> list[dict[str, object]]:
        """The conversation; of a single response, the prompt and it. Raises RewardError when `messages_json` is no JSON list."""
        if not self.messages_json:
            return [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": self.response}]
        try:
            found = json.loads(self.messages_json)
        except (ValueError, RecursionError) as error:
            raise RewardError(f"expected messages_json to be a JSON list; found {error}") from None
        if not isinstance(found, list):
            raise RewardError(f"expected messages_json to be a JSON list; found a {type(found).__name__}")
        return found

    @property
    def metadata(self) -> dict[str, object]:
        """The row's other columns. Raises RewardError when `metadata_json` is not a JSON object."""
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
    def size(self) -> int:
        """The number of its characters and tokens."""
        return sum(len(each) for each in self if each is not None)

    @property
    def seen(self) -> str:
        """The prompt as the model saw it if that is known, else as plain text."""
        return self.templated_prompt or self.prompt

    @property
    def raw(self) -> str:
        """The response with special tokens if that is known, else without."""
        return self.response_raw or self.response


class Status(IntEnum):
    """How scoring an item ended. The numbers are those of ScoreStatus in the proto."""

    OK = 1
    ERROR = 2
    TIMEOUT = 3
    INVALID = 4


class Outcome(NamedTuple):
    """The output of one reward for one item.

    Args:
        extras: further named numbers, which are reported but not part of the score.
        token_rewards: one number per token of the item, or empty. They are a part of `value`; the rest belongs to the last token.
    """

    status: Status
    value: float = 0.0
    message: str = ""
    extras: Mapping[str, float] = {}
    token_rewards: tuple[float, ...] = ()


class RewardError(Exception):
    """A reward cannot score this item. The message states what was expected and what was found."""


NO_LABEL = "expected a label to compare with; found none"
"""Prefix of the message of every item that fails because it has no label."""
NO_TOKENS = "expected the response's tokens, for a reward that reads them; found only texts"

MESSAGE_LIMIT = 2000
EXTRAS_LIMIT = 32
_LARGEST = 3.4028234663852886e38  # the maximum of float32, in which the experience log stores rewards per token


def ok(value: float) -> Outcome:
    return Outcome(Status.OK, value)


def failed(status: Status, message: str) -> Outcome:
    text = printable(message)
    return Outcome(status, message=text if len(text) <= MESSAGE_LIMIT else text[:MESSAGE_LIMIT] + " ...")


def printable(text: str) -> str:
    """The text without lone surrogates, which neither protobuf nor UTF-8 can encode."""
    return text.encode("utf-8", "replace").decode()


def outcome_of(answer: object, tokens: int = 0) -> Outcome:
    """The outcome for a reward's return value.

    Args:
        answer: a number; a list with one number per token, whose sum is the value; or a mapping with `score`, which is either of
            these, and further numbers. A mapping may also have `token_rewards`, alone or together with a number as `score`.
        tokens: number of tokens of the item. 0: the item has no tokens, so a list is invalid.
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
        return f"expected one number, since the item has no tokens; found {_shown(value)}"
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
        """Name of the reward's part of a score."""

    @property
    def weight(self) -> float:
        """Weight of the reward's value in the score."""

    @property
    def version(self) -> str:
        """A version that changes whenever the reward's scores may change."""

    @property
    def description(self) -> str:
        """One line of description."""

    @property
    def correctness(self) -> bool:
        """Whether a value is 1 for a right answer and 0 for a wrong one, so that a mean of values is an accuracy."""

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads an item's tokens, which clients omit if no reward does."""

    @property
    def available(self) -> bool:
        """Whether the reward is known to be able to score now."""

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Returns one outcome per item, in order. Does not raise for failures of an item or a plugin."""
