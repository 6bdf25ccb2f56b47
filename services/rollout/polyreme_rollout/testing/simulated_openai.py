"""A small /v1 on a simulated engine: models, and completions of prompts given as token ids.

Invariant: a completion's text is its token ids in decimal, so a client can check it against `simulated_engine.sample`.
"""

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, Field

from polyreme_rollout.engine.protocol import EngineRequest, InferenceEngine, Sampling


class _Completion(BaseModel):
    model: str
    prompt: list[int] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, ge=0)
    seed: int = 0
    cache_salt: str = ""


def make_openai_app(engine: InferenceEngine, served_name: str, salt: Callable[[], Awaitable[str]]) -> FastAPI:
    """See `InferenceEngine.openai_app`."""
    app = FastAPI(title="Simulated /v1")
    numbers = itertools.count()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": served_name, "object": "model"}]}

    @app.post("/v1/completions")
    async def completions(asked: _Completion) -> dict[str, Any]:
        request = EngineRequest(
            f"openai.{next(numbers)}",
            asked.prompt,
            asked.max_tokens,
            asked.seed,
            f"{await salt()} {asked.cache_salt}",
            Sampling(asked.temperature, 1.0, -1, ()),
        )
        ids: list[int] = []
        async for delta in engine.generate(request):
            ids += delta.token_ids
        choice = {"index": 0, "text": " ".join(map(str, ids)), "finish_reason": "length"}
        usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": len(ids)}
        return {"object": "text_completion", "model": served_name, "choices": [choice], "usage": usage}

    return app
