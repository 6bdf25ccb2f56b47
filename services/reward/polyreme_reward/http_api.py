"""The HTTP application: the native protocol, the foreign protocols, and the routes for operators.

Invariant: the routes only translate, and a failure has no score.
"""

import json
from collections.abc import Sequence
from typing import Literal

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field, StrictInt

from polyreme import API_VERSION
from polyreme_reward import foreign_wires, http_errors
from polyreme_reward.items import Item, Status, printable
from polyreme_reward.metrics import RewardMetrics
from polyreme_reward.scorer import BATCH_LIMIT, Scored, Scorer


class NativeItem(BaseModel):
    key: str = Field(
        "", description="Identifies this exact item, so that a retry is not scored again. '': the answer is not cached."
    )
    prompt: str = Field("", description="The prompt as plain text.")
    templated_prompt: str = Field("", description="The prompt as the model saw it, including template and special tokens.")
    response: str = Field(description="The response without special tokens.")
    response_raw: str = Field("", description="The response with special tokens.")
    label: str | None = Field(None, description="The reference answer; null or empty: the row has none.")
    metadata: dict[str, object] = Field({}, description="The other columns of the row.")
    token_ids: list[StrictInt] = Field(
        [], description="The response's tokens, including the stop token; empty: only texts are known."
    )
    token_texts: list[str] = Field([], description="The text of each token; together they are response_raw.")
    messages: list[dict[str, object]] = Field(
        [], description="The conversation of an episode, whose last answer is the response."
    )


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
    score: float | None = Field(description="null unless the status is ok.")
    token_rewards: list[float] | None = Field(
        description="One number per token, a part of the score; null if no reward returns numbers per token."
    )
    parts: list[NativePart]
    message: str


class NativeReply(BaseModel):
    results: list[NativeResult]


class RewardDescription(BaseModel):
    name: str
    weight: float
    version: str
    description: str
    correctness: bool = Field(description="Whether a value is 1 for a right answer and 0 for a wrong one.")
    reads_tokens: bool = Field(description="Whether it reads the tokens of an item.")


class RewardList(BaseModel):
    api: int
    rewards: list[RewardDescription]


def make_app(scorer: Scorer, metrics: RewardMetrics, special_tokens: Sequence[str], ready: list[bool]) -> FastAPI:
    """The HTTP application.

    Args:
        scorer: computes the scores.
        metrics: served at /metrics.
        special_tokens: texts to remove from the prompts, responses and labels of the foreign protocols.
        ready: a list with one element, the answer of /ready.
    """
    app = FastAPI(title="Polyreme reward service", version=str(API_VERSION))
    http_errors.add_handlers(app)
    tokens = foreign_wires.SpecialTokens(special_tokens)
    for router in (
        foreign_wires.paddlenlp(scorer, tokens),
        foreign_wires.openrlhf(scorer, tokens),
        _native_wire(scorer),
        _operators(metrics, ready),
    ):
        app.include_router(router)
    return app


def _native_wire(scorer: Scorer) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/score",
        response_model=NativeReply,
        responses=http_errors.BUSY,
        summary="The native protocol, with a status for every item",
    )
    async def native(body: NativeRequest) -> object:
        items = [
            Item(
                i.key,
                i.prompt,
                i.response,
                i.response_raw,
                i.label or None,
                json.dumps(i.metadata) if i.metadata else "",
                i.templated_prompt,
                tuple(i.token_ids),
                tuple(i.token_texts),
                json.dumps(i.messages) if i.messages else "",
            )
            for i in body.items
        ]
        answers = await scorer.score(items)
        return {"results": [_native(item.key, answer) for item, answer in zip(items, answers, strict=True)]}

    @router.get("/v1/rewards", response_model=RewardList, summary="The rewards of every score")
    async def rewards() -> object:
        described = [RewardDescription.model_validate(reward, from_attributes=True) for reward in scorer.rewards]
        return RewardList(api=API_VERSION, rewards=described)

    return router


def _operators(metrics: RewardMetrics, ready: list[bool]) -> APIRouter:
    router = APIRouter()

    @router.get("/health", summary="Whether the process answers")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/ready", responses={503: {"description": "Starting or draining."}}, summary="Whether the service accepts items")
    async def is_ready() -> Response:
        return JSONResponse({"ready": ready[0]}, 200 if ready[0] else 503)

    @router.get("/metrics", response_class=PlainTextResponse, summary="Prometheus metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _native(key: str, answer: Scored) -> dict[str, object]:
    return {
        "key": printable(key),
        "status": answer.status.name.lower(),
        "score": answer.score if answer.status is Status.OK else None,
        "token_rewards": answer.token_rewards or None,
        "parts": [part._asdict() for part in answer.parts],
        "message": answer.message,
    }
