"""The HTTP protocols of PaddleNLP and OpenRLHF.

Invariant: this module only translates, and a failure has no score. These protocols have no status per item, so one failed item
fails the whole request. PaddleNLP's own server replies to an error with zeros as scores. This one replies `null`, for which
PaddleNLP's trainer also uses zeros but logs a warning.
"""

from collections.abc import Sequence

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from polyreme.dataset.columns import label_text
from polyreme_reward.http_errors import BUSY, PaddleNlpReply, Problem, note, unprocessable
from polyreme_reward.items import NO_LABEL, Item, Status
from polyreme_reward.scorer import Scored, Scorer


class PaddleNlpRequest(BaseModel):
    """The request of PaddleNLP's trainers: lists of equal length. A label may be null or empty: there is none."""

    src: list[str]
    tgt: list[str | None]
    response: list[str]


class OpenRlhfRequest(BaseModel):
    """The request of OpenRLHF's trainers. `query` holds prompt and response; the other lists, if present, have the same length. A
    label may be a number."""

    query: list[str]
    prompts: list[str] | None = None
    labels: list[str | bool | int | float | None] | None = None


class OpenRlhfReply(BaseModel):
    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]]


class SpecialTokens:
    """The texts of special tokens, which foreign trainers leave in the texts that they send."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._tokens = tuple(token for token in tokens if token)

    def removed(self, text: str) -> str:
        """The text without special tokens."""
        for token in self._tokens:
            text = text.replace(token, "")
        return text

    def response(self, query: str, prompt: str) -> str | None:
        """The query without its prompt, or None if it does not start with the prompt. Padding and a BOS token may precede it."""
        start = 0
        while not query.startswith(prompt, start):
            lead = next((token for token in self._tokens if query.startswith(token, start)), None)
            if lead is None:
                return None
            start += len(lead)
        return query[start + len(prompt) :]


def paddlenlp(scorer: Scorer, tokens: SpecialTokens) -> APIRouter:
    """The route POST / of the PaddleNLP protocol."""
    router = APIRouter()

    @router.post("/", response_model=PaddleNlpReply, responses=BUSY, summary="The PaddleNLP protocol")
    async def score(body: PaddleNlpRequest) -> object:
        if not len(body.src) == len(body.tgt) == len(body.response):
            lengths = f"{len(body.src)}, {len(body.tgt)} and {len(body.response)}"
            return failure(f"expected src, tgt and response of equal length; found {lengths}")
        if not body.src:
            return PaddleNlpReply(score=[])
        rows = zip(body.src, body.tgt, body.response, strict=True)
        answers = await scorer.score([_item(tokens, prompt, response, label) for prompt, label, response in rows])
        if problem := _failures(answers):
            return failure(problem)
        return PaddleNlpReply(score=[answer.score for answer in answers])

    def failure(problem: str) -> PaddleNlpReply:
        note("/", problem)
        return PaddleNlpReply(error_code=500, error_msg=problem)

    return router


def openrlhf(scorer: Scorer, tokens: SpecialTokens) -> APIRouter:
    """The route POST /get_reward of the OpenRLHF protocol."""
    router = APIRouter()
    path = "/get_reward"
    failed: dict[int | str, dict[str, object]] = {500: {"model": Problem, "description": "An item could not be scored."}}

    @router.post(path, response_model=OpenRlhfReply, responses={**BUSY, **failed}, summary="The OpenRLHF protocol")
    async def score(body: OpenRlhfRequest) -> object:
        try:
            items = _openrlhf_items(body, tokens)
        except ValueError as error:
            return unprocessable(path, str(error))
        if not items:
            return OpenRlhfReply(rewards=[], scores=[], extra_logs={})
        answers = await scorer.score(items)
        if problem := _failures(answers):
            if all(NO_LABEL in answer.message for answer in answers if answer.status is not Status.OK):
                return unprocessable(path, problem)  # a retry of the same request would fail again
            note(path, problem)
            return JSONResponse({"detail": problem}, 500)
        scores = [answer.score for answer in answers]
        return OpenRlhfReply(rewards=scores, scores=scores, extra_logs=_columns(answers))

    return router


def _openrlhf_items(body: OpenRlhfRequest, tokens: SpecialTokens) -> list[Item]:
    """The items of a request. Raises ValueError when its lists differ in length, or a query does not start with its prompt."""
    count = len(body.query)
    prompts = body.prompts if body.prompts is not None else [""] * count
    labels = body.labels if body.labels is not None else [None] * count
    if not len(prompts) == len(labels) == count:
        raise ValueError(f"expected query, prompts and labels of equal length; found {count}, {len(prompts)} and {len(labels)}")
    items = []
    for position, (query, prompt, label) in enumerate(zip(body.query, prompts, labels, strict=True)):
        response = tokens.response(query, prompt)
        if response is None:
            raise ValueError(
                f"item {position}: expected a query that starts with its prompt; found {query[:80]!r}. Add tokens that precede "
                "the prompt to reward.special_tokens, and do not truncate prompts"
            )
        items.append(_item(tokens, prompt, response, label_text(label)))
    return items


def _item(tokens: SpecialTokens, prompt: str, response: str, label: str | None) -> Item:
    clean = tokens.removed
    return Item("", clean(prompt), clean(response), response, clean(label or "") or None, templated_prompt=prompt)


def _failures(answers: Sequence[Scored]) -> str:
    """A description of the items without a score, or '' when all have one."""
    bad = [(position, answer) for position, answer in enumerate(answers) if answer.status is not Status.OK]
    shown = [f"item {position}: {answer.status.name} {answer.message}" for position, answer in bad[:5]]
    return "; ".join(shown) + (f"; and {len(bad) - 5} more" if len(bad) > 5 else "")


def _columns(answers: Sequence[Scored]) -> dict[str, list[float]]:
    """The values of the parts that all items have, by name."""
    rows = [{part.name: part.raw for part in answer.parts} for answer in answers]
    common = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: [row[name] for row in rows] for name in common}
