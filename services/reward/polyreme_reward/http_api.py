"""The HTTP wires: PaddleNLP's, OpenRLHF's and our own.

Invariant: they only translate, and a failure carries no number. The foreign wires have no status per item, so one failed item fails
their whole request, which is logged. Where PaddleNLP's server answers an error with zeros as scores, this one answers `null`: its
trainer uses zeros then too, but logs a warning.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.encoders import jsonable_encoder
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field

from polyreme import API_VERSION
from polyreme.config.dataset_rows import label_text
from polyreme_reward.items import NO_LABEL, Item, Status, printable
from polyreme_reward.metrics import Metrics
from polyreme_reward.scorer import BATCH_LIMIT, BadBatch, Refused, Scored, Scorer

log = logging.getLogger(__name__)


class PaddleNlpRequest(BaseModel):
    """What PaddleNLP's trainers send: lists of one length."""

    src: list[str]
    tgt: list[str]
    response: list[str]


class PaddleNlpReply(BaseModel):
    """What PaddleNLP's trainers read. `score` is null unless `error_code` is 0."""

    error_code: int = 0
    error_msg: str = "Success"
    score: list[float] | None = None


class OpenRlhfRequest(BaseModel):
    """What OpenRLHF's trainers send. `query` is prompt and response; the other lists, if given, have its length. A label may be a number."""

    query: list[str]
    prompts: list[str] | None = None
    labels: list[str | bool | int | float | None] | None = None


class OpenRlhfReply(BaseModel):
    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]]


class NativeItem(BaseModel):
    key: str = Field("", description="Names this exact question, so that a retry is answered once; empty: not remembered.")
    prompt: str = Field("", description="The prompt as plain text.")
    templated_prompt: str = Field("", description="The prompt as the model saw it, template and special tokens included.")
    response: str = Field(description="The response without special tokens.")
    response_raw: str = Field("", description="The response with special tokens.")
    label: str = Field("", description="The reference answer.")
    metadata: dict[str, Any] = Field({}, description="The row's other columns.")


class NativeRequest(BaseModel):
    items: list[NativeItem] = Field(min_length=1, max_length=BATCH_LIMIT)


class NativePart(BaseModel):
    name: str
    raw: float
    weighted: float
    version: str


class NativeResult(BaseModel):
    key: str
    status: Literal["ok", "error", "timeout", "invalid"]
    score: float | None = Field(description="Null unless the status is ok.")
    parts: list[NativePart]
    message: str


class NativeReply(BaseModel):
    results: list[NativeResult]


class RewardDescription(BaseModel):
    name: str
    weight: float
    version: str
    description: str


class RewardList(BaseModel):
    api: int
    rewards: list[RewardDescription]


class Problem(BaseModel):
    detail: str


_LOGGED = 1000  # characters of a failure

_BUSY: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The body is not UTF-8 text."},
    401: {"model": Problem, "description": "The service has a token, and the request does not carry it."},
    413: {"model": Problem, "description": "The body is too large."},
    429: {"model": Problem, "description": "The queue is full; ask again after `retry-after` seconds."},
    503: {"model": Problem, "description": "The service shuts down; ask another one after `retry-after` seconds."},
}


def make_app(scorer: Scorer, metrics: Metrics, special_tokens: Sequence[str], ready: list[bool]) -> FastAPI:
    """The HTTP application.

    Args:
        scorer: computes the scores.
        metrics: shown under /metrics.
        special_tokens: texts that are removed from the prompts, responses and labels of the foreign wires, which carry them.
        ready: its only element is the answer of /ready.
    """
    app = FastAPI(title="Polyreme reward service", version=str(API_VERSION))

    def clean(text: str) -> str:
        for token in special_tokens:
            text = text.replace(token, "")
        return text

    def behind(query: str, prompt: str) -> str | None:
        """The query without its prompt, before which a decoded sequence may have padding and a begin token; None: it has no such prompt."""
        while not query.startswith(prompt):
            lead = next((token for token in special_tokens if token and query.startswith(token)), None)
            if lead is None:
                return None
            query = query[len(lead) :]
        return query[len(prompt) :]

    def note(path: str, problem: object) -> None:
        log.warning("a request to %s failed: %s", path, str(problem)[:_LOGGED].replace("\n", " "))

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Response:
        note(request.url.path, error)
        status = 503 if error.draining else 429
        headers = {"retry-after": str(max(1, round(error.retry_after)))}
        if request.url.path == "/":
            return JSONResponse(PaddleNlpReply(error_code=status, error_msg=str(error)).model_dump(), status, headers)
        return JSONResponse({"detail": str(error)}, status, headers)

    @app.exception_handler(BadBatch)
    async def bad_batch(request: Request, error: BadBatch) -> Response:
        note(request.url.path, error)
        if request.url.path == "/":
            return JSONResponse(PaddleNlpReply(error_code=500, error_msg=str(error)).model_dump())
        return _unprocessable(str(error))

    @app.exception_handler(RequestValidationError)
    async def bad_request(request: Request, error: RequestValidationError) -> Response:
        detail = jsonable_encoder(error.errors(), custom_encoder={bytes: lambda value: value.decode("utf-8", "replace")})
        note(request.url.path, [{k: v for k, v in entry.items() if k != "input"} for entry in detail])
        try:
            return JSONResponse({"detail": detail}, 422)
        except ValueError:  # the input in it has what JSON cannot hold: NaN, lone surrogates
            return JSONResponse({"detail": [{k: v for k, v in entry.items() if k != "input"} for entry in detail]}, 422)

    @app.post("/", response_model=PaddleNlpReply, responses=_BUSY, summary="PaddleNLP's wire")
    async def paddlenlp(body: PaddleNlpRequest) -> Any:
        if not len(body.src) == len(body.tgt) == len(body.response):
            lengths = f"{len(body.src)}, {len(body.tgt)} and {len(body.response)}"
            problem = f"expected src, tgt and response of one length; found {lengths}"
            note("/", problem)
            return PaddleNlpReply(error_code=500, error_msg=problem)
        if not body.src:
            return PaddleNlpReply(score=[])
        rows = zip(body.src, body.tgt, body.response, strict=True)
        items = [Item("", clean(src), clean(response), response, clean(tgt), templated_prompt=src) for src, tgt, response in rows]
        if problem := _failures(answers := await scorer.score(items)):
            note("/", problem)
            return PaddleNlpReply(error_code=500, error_msg=problem)
        return PaddleNlpReply(score=[answer.score for answer in answers])

    @app.post(
        "/get_reward",
        response_model=OpenRlhfReply,
        responses={**_BUSY, 500: {"model": Problem, "description": "An item could not be scored."}},
        summary="OpenRLHF's wire",
    )
    async def openrlhf(body: OpenRlhfRequest) -> Any:
        count = len(body.query)
        prompts = body.prompts if body.prompts is not None else [""] * count
        labels = body.labels if body.labels is not None else [None] * count
        if not len(prompts) == len(labels) == count:
            problem = f"expected query, prompts and labels of one length; found {count}, {len(prompts)} and {len(labels)}"
            note("/get_reward", problem)
            return _unprocessable(problem)
        if not count:
            return OpenRlhfReply(rewards=[], scores=[], extra_logs={})
        items = []
        for place, (query, prompt, label) in enumerate(zip(body.query, prompts, labels, strict=True)):
            response = behind(query, prompt)
            if response is None:
                problem = (
                    f"item {place}: expected a query that begins with its prompt; found {query[:80]!r}. Add tokens that stand in "
                    "front of it to reward.special_tokens, and leave prompts whole"
                )
                note("/get_reward", problem)
                return _unprocessable(problem)
            text = clean(label_text(label))
            items.append(Item("", clean(prompt), clean(response), response, text, templated_prompt=prompt))
        answers = await scorer.score(items)
        if problem := _failures(answers):
            note("/get_reward", problem)
            if all(NO_LABEL in answer.message for answer in answers if answer.status is not Status.OK):
                return _unprocessable(problem)  # the same request would fail again
            return JSONResponse({"detail": problem}, 500)
        scores = [answer.score for answer in answers]
        return OpenRlhfReply(rewards=scores, scores=scores, extra_logs=_columns(answers))

    @app.post("/v1/score", response_model=NativeReply, responses=_BUSY, summary="The native wire: a status for every item")
    async def native(body: NativeRequest) -> Any:
        items = [
            Item(
                i.key,
                i.prompt,
                i.response,
                i.response_raw,
                i.label,
                json.dumps(i.metadata) if i.metadata else "",
                i.templated_prompt,
            )
            for i in body.items
        ]
        answers = await scorer.score(items)
        return {"results": [_native(item.key, answer) for item, answer in zip(items, answers, strict=True)]}

    @app.get("/v1/rewards", response_model=RewardList, summary="The rewards behind every score")
    async def rewards() -> Any:
        return RewardList(
            api=API_VERSION,
            rewards=[
                RewardDescription(name=r.name, weight=r.weight, version=r.version, description=r.description)
                for r in scorer.rewards
            ],
        )

    @app.get("/health", summary="The process answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"description": "Starting or draining."}}, summary="It takes items")
    async def is_ready() -> Response:
        return JSONResponse({"ready": ready[0]}, 200 if ready[0] else 503)

    @app.get("/metrics", response_class=PlainTextResponse, summary="Prometheus metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _native(key: str, answer: Scored) -> dict[str, Any]:
    return {
        "key": printable(key),
        "status": answer.status.name.lower(),
        "score": answer.score if answer.status is Status.OK else None,
        "parts": [part._asdict() for part in answer.parts],
        "message": answer.message,
    }


def _failures(answers: Sequence[Scored]) -> str:
    """What went wrong with the items that have no score; empty when all have one."""
    bad = [(position, answer) for position, answer in enumerate(answers) if answer.status is not Status.OK]
    shown = [f"item {position}: {answer.status.name} {answer.message}" for position, answer in bad[:5]]
    return "; ".join(shown) + (f"; and {len(bad) - 5} more" if len(bad) > 5 else "")


def _columns(answers: Sequence[Scored]) -> dict[str, list[float]]:
    """The parts that every item has, by name."""
    rows = [{part.name: part.raw for part in answer.parts} for answer in answers]
    common = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: [row[name] for row in rows] for name in common}


def _unprocessable(message: str) -> Response:
    """A 422 in FastAPI's own form, for what its validation does not check."""
    return JSONResponse({"detail": [{"type": "value_error", "loc": ["body"], "msg": message}]}, 422)
