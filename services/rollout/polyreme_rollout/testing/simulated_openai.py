"""A small /v1 on a simulated engine: models, and completions of prompts given as token ids, whole or streamed.

Invariant: a completion's text is its token ids in decimal, so a client can check it against `simulated_engine.sample`.
"""

import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from polyreme_rollout.engine.protocol import EngineRequest, InferenceEngine, NewTokens, Sampling


class _Completion(BaseModel):
    model: str = ""
    prompt: list[int] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0)
    seed: int = 0
    cache_salt: str = ""
    stream: bool = False
    logprobs: int | None = None


def make_openai_app(engine: InferenceEngine, served_name: str, salt: Callable[[], Awaitable[str]]) -> FastAPI:
    """See `InferenceEngine.openai_app`."""
    app = FastAPI(title="Simulated /v1")
    numbers = itertools.count()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": served_name, "object": "model"}]}

    @app.post("/v1/completions", response_model=None)
    async def completions(asked: _Completion) -> dict[str, Any] | StreamingResponse:
        request = EngineRequest(
            f"openai.{next(numbers)}",
            asked.prompt,
            asked.max_tokens,
            asked.seed,
            f"{await salt()} {asked.cache_salt}",
            Sampling(asked.temperature, 1.0, -1, ()),
        )
        deltas = engine.generate(request)
        if asked.stream:
            return StreamingResponse(_events(deltas, asked, served_name), media_type="text/event-stream")
        ids: list[int] = []
        logprobs: list[float] = []
        async for delta in deltas:
            ids += delta.token_ids
            logprobs += delta.logprobs
        return _part(NewTokens(ids, logprobs, "length"), asked, served_name) | {
            "usage": {"prompt_tokens": len(asked.prompt), "completion_tokens": len(ids)}
        }

    return app


async def _events(deltas: AsyncIterator[NewTokens], asked: _Completion, served_name: str) -> AsyncIterator[str]:
    async for delta in deltas:
        yield f"data: {json.dumps(_part(delta, asked, served_name))}\n\n"
    yield "data: [DONE]\n\n"


def _part(tokens: NewTokens, asked: _Completion, served_name: str) -> dict[str, Any]:
    """A completion, or an event of one, with these tokens."""
    choice: dict[str, Any] = {"index": 0, "text": " ".join(map(str, tokens.token_ids)), "finish_reason": tokens.finish}
    if asked.logprobs is not None:
        choice["logprobs"] = {"tokens": list(map(str, tokens.token_ids)), "token_logprobs": list(tokens.logprobs)}
    return {"object": "text_completion", "model": served_name, "choices": [choice]}
