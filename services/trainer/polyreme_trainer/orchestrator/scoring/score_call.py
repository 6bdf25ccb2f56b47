"""One call of a reward server: its questions and the interpretation of its answer.

Invariant: pure. A result belongs to the item with its key; an answer with other keys is an error.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from polyreme.api.v1 import reward_pb2
from polyreme.experience.records import RewardCall

_CALLS_KEPT = 16  # maximum per sample, since a long outage causes many
_OK = reward_pb2.SCORE_STATUS_OK
_VARIABLE = re.compile(r"""'[^']*'|"[^"]*"|\d+(\.\d+)?""")  # parts of a message that differ between items with one problem


class ScoreError(Exception):
    """Some samples of this attempt have no score after all attempts.

    Attributes:
        verdict: the single reason for which the rewards themselves failed every sample of the group; "" when there is none.
            Quoted texts and numbers, which differ between samples, are masked.
    """

    def __init__(self, message: str, verdict: str = "") -> None:
        super().__init__(message)
        self.verdict = verdict


@dataclass(frozen=True)
class Question:
    """One sample to score. `name` distinguishes samples with the same text; `templated_prompt` is the model's input; `token_ids`
    are those of the response; `messages_json` is the conversation of an episode, whose last answer is the response."""

    name: tuple[str | int, ...]
    prompt: str
    response: str
    response_raw: str
    label: str
    metadata_json: str
    templated_prompt: str = ""
    token_ids: tuple[int, ...] = ()
    messages_json: str = ""


@dataclass
class CallOutcome:
    """The outcome of one call: results by position, and the error of the others.

    Attributes:
        error: error of the items without a result.
        counts: whether the server judged the items, so that the call counts as an attempt.
        outage: whether the error indicates an outage rather than bad items.
        verdict: see `ScoreError`.
        server: id of the server; "" when none was registered.
        failures: (status, message) by position, for the items that the server answered without a score.
    """

    scored: dict[int, reward_pb2.ScoreResult] = field(default_factory=dict)
    error: str = ""
    counts: bool = True
    outage: bool = False
    verdict: str = ""
    retry_after: float = 0.0
    server: str = ""
    failures: dict[int, tuple[str, str]] = field(default_factory=dict)

    def note(self, positions: Sequence[int], seconds: float, calls: Sequence[list[RewardCall]]) -> None:
        """Adds this call to the calls of each of its samples."""
        for position in positions:
            status, message = ("ok", "") if position in self.scored else self.failures.get(position, ("unavailable", self.error))
            calls[position].append(RewardCall(self.server, status, message, seconds))
            del calls[position][:-_CALLS_KEPT]

    def joined(self, other: "CallOutcome") -> "CallOutcome":
        """The outcome of two calls for different positions, without a server."""
        return CallOutcome(
            scored=self.scored | other.scored,
            error=self.error or other.error,
            counts=self.counts and other.counts,
            outage=self.outage or other.outage,
            verdict=self.verdict if self.verdict == other.verdict else "",
            retry_after=max(self.retry_after, other.retry_after),
            failures=self.failures | other.failures,
        )


def describe(listed: reward_pb2.ListRewardsResponse) -> str:
    """Names, versions and weights of a server's rewards, as part of item keys."""
    return json.dumps([[reward.name, reward.version, reward.weight] for reward in listed.rewards])


def item_of(question: Question, rewards: str, token_texts: Callable[[Sequence[int]], list[str]] | None) -> reward_pb2.ScoreItem:
    """The question as an item, with its tokens if `token_texts` is given. Its key also covers the tokens, since different tokens
    may have the same text."""
    ids = question.token_ids if token_texts else ()
    texts = (question.prompt, question.templated_prompt, question.response_raw, question.label, question.messages_json)
    identity = [*question.name, *texts, rewards, *ids]
    return reward_pb2.ScoreItem(
        key=xxhash.xxh3_128_hexdigest(json.dumps(identity).encode()),
        prompt=question.prompt,
        response=question.response,
        response_raw=question.response_raw,
        label=question.label,
        metadata_json=question.metadata_json,
        templated_prompt=question.templated_prompt,
        token_ids=ids,
        token_texts=token_texts(ids) if token_texts and ids else (),
        messages_json=question.messages_json,
    )


def verdict_of(results: Sequence[reward_pb2.ScoreResult], remote: tuple[str, ...]) -> str:
    """The single reason for which rewards that run in the service failed all items; "" when there is none, or when it may be
    transient: a deadline, or a failure of a reward whose messages begin with one of `remote`."""
    reasons = {_VARIABLE.sub("_", result.message) for result in results}
    passing = any(
        result.status in (_OK, reward_pb2.SCORE_STATUS_TIMEOUT) or result.message.startswith(remote) for result in results
    )
    return "" if passing or len(reasons) != 1 else reasons.pop()


def outcome_of(
    response: reward_pb2.ScoreResponse, items: Sequence[reward_pb2.ScoreItem], positions: Sequence[int]
) -> CallOutcome:
    if [result.key for result in response.results] != [item.key for item in items]:
        raise ScoreError(f"expected {len(items)} results with the items' keys in order; found {len(response.results)} others")
    outcome = CallOutcome()
    for position, result in zip(positions, response.results, strict=True):
        if result.status == _OK:
            outcome.scored[position] = result
        else:
            outcome.outage |= result.status != reward_pb2.SCORE_STATUS_INVALID
            status = reward_pb2.ScoreStatus.Name(result.status).removeprefix("SCORE_STATUS_").lower()
            outcome.failures[position] = status, result.message
            outcome.error = outcome.error or f"{status}: {result.message}"
    return outcome
