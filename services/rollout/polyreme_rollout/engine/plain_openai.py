"""A small OpenAI-compatible /v1 on any inference engine: models, completions and chat completions, whole or streamed.

Invariant: a request with an option that this API lacks is refused, never answered without it. vLLM's engine has its own API.
"""

import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from polyreme.dataset.chat import Chat, read_chat, render
from polyreme.errors import DataError
from polyreme.net.http_server import left
from polyreme.process.tasks import unless
from polyreme_rollout.engine.protocol import EngineRequest, InferenceEngine, NewTokens, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Codec(Protocol):
    """Text of a model. `stop_ids` end an answer."""

    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]: ...

    def chat(self, chat: Chat) -> list[int]:
        """The tokens of a conversation, up to where the answer begins. Raises DataError if the template refuses it."""

    def decode(self, ids: Sequence[int]) -> str: ...


class TokenizerCodec:
    """The text of a Hugging Face tokenizer. `day`: the day that its chat template shows; None: today."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", stop_ids: tuple[int, ...], day: date | None = None) -> None:
        self._tokenizer, self.stop_ids, self._day = tokenizer, stop_ids, day

    @classmethod
    def of(cls, model_dir: Path, day: date | None = None) -> "TokenizerCodec":
        """A model directory's tokenizer. Its answers end with the tokens of generation_config.json, else with the tokenizer's."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        file = model_dir / "generation_config.json"
        stop = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        stop = tokenizer.eos_token_id if stop is None else stop
        return cls(tokenizer, tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,), day)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def chat(self, chat: Chat) -> list[int]:
        (text,) = render(self._tokenizer, [chat], opened=True, day=self._day)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def decode_whole(self, ids: Sequence[int]) -> str:
        """The text with its special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str = ""
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    seed: int | None = None
    n: int = Field(1, ge=1, le=1)
    user: str = ""
    cache_salt: str = ""
    stream: bool = False


class _Completion(_Asked):
    prompt: list[int] | str = Field(min_length=1)
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=1)


class _Chat(_Asked):
    messages: list[dict[str, object]] = Field(min_length=1)
    tools: list[dict[str, object]] | None = Field(None, min_length=1)
    tool_choice: Literal["none"] | None = None  # no parser reads calls from the answer
    chat_template_kwargs: dict[Literal["tools"], object] = {}  # those of `JsonRequests`
    max_completion_tokens: int | None = Field(None, ge=1)


def make_openai_app(engine: InferenceEngine, served_name: str, salt: Callable[[], Awaitable[str]], codec: Codec) -> FastAPI:
    """See `InferenceEngine.openai_app`."""
    app = FastAPI(title=f"/v1 of {engine.name}")
    numbers = itertools.count(1)

    async def begin(asked: _Asked, ids: list[int], longest: int | None) -> AsyncIterator[NewTokens]:
        if asked.model not in ("", served_name):
            raise HTTPException(404, f"expected the model {served_name!r}; found {asked.model!r}")
        room = engine.max_model_len - len(ids)
        if not ids or room < (longest or 1) or any(not 0 <= id < engine.vocab_size for id in ids):
            raise HTTPException(
                400, f"expected 1 to {engine.max_model_len} known tokens with the answer; found {len(ids)} and {longest}"
            )
        seed = secrets.randbits(63) if asked.seed is None else asked.seed  # replicas have other answers to the same request
        sampling = Sampling(asked.temperature, asked.top_p, asked.top_k, codec.stop_ids)
        salted = f"{await salt()} {asked.cache_salt}"
        return engine.generate(EngineRequest(f"openai.{next(numbers)}", ids, longest or room, seed, salted, sampling))

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        card = {"id": served_name, "object": "model", "owned_by": "polyreme", "max_model_len": engine.max_model_len}
        return {"object": "list", "data": [card]}

    @app.post("/v1/completions", response_model=None)
    async def completions(asked: _Completion, request: Request) -> dict[str, object] | StreamingResponse:
        ids = codec.encode(asked.prompt) if isinstance(asked.prompt, str) else asked.prompt
        deltas = await begin(asked, ids, asked.max_tokens)

        def part(text: str, tokens: NewTokens) -> dict[str, object]:
            choice: dict[str, object] = {"index": 0, "text": text, "finish_reason": tokens.finish}
            if asked.logprobs is not None:
                choice["logprobs"] = {"tokens": list(map(str, tokens.token_ids)), "token_logprobs": list(tokens.logprobs)}
            return choice

        return await _reply(request, deltas, asked, "text_completion", served_name, len(ids), codec, part, part)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: _Chat, request: Request) -> dict[str, object] | StreamingResponse:
        try:
            ids = codec.chat(read_chat(asked.messages, "`messages`", asked.tools))
        except DataError as error:
            raise HTTPException(400, str(error)) from None
        deltas = await begin(asked, ids, asked.max_completion_tokens or asked.max_tokens)

        def whole(text: str, tokens: NewTokens) -> dict[str, object]:
            return {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": tokens.finish}

        def part(text: str, tokens: NewTokens) -> dict[str, object]:
            return {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": tokens.finish}

        return await _reply(request, deltas, asked, "chat.completion", served_name, len(ids), codec, whole, part)

    return app


_Choice = Callable[[str, NewTokens], dict[str, object]]


async def _reply(
    request: Request,
    deltas: AsyncIterator[NewTokens],
    asked: _Asked,
    kind: str,
    served_name: str,
    prompt_tokens: int,
    codec: Codec,
    whole: _Choice,
    part: _Choice,
) -> dict[str, object] | StreamingResponse:
    head = {"id": f"{kind}-{time.time_ns()}", "created": int(time.time()), "model": served_name}
    if asked.stream:
        part_kind = f"{kind}.chunk" if isinstance(asked, _Chat) else kind
        events = _events(deltas, codec, lambda text, tokens: {**head, "object": part_kind, "choices": [part(text, tokens)]})
        return StreamingResponse(events, media_type="text/event-stream")
    tokens = await unless(left(request.receive), _all(deltas))
    if tokens is None:  # nobody waits for the answer
        return {}
    count = len(tokens.token_ids)
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
    return {**head, "object": kind, "choices": [whole(codec.decode(tokens.token_ids), tokens)], "usage": usage}


async def _all(deltas: AsyncIterator[NewTokens]) -> NewTokens:
    ids, logprobs, finish = list[int](), list[float](), None
    async for delta in deltas:
        ids += delta.token_ids
        logprobs += delta.logprobs
        finish = delta.finish
    return NewTokens(ids, logprobs, finish)


async def _events(
    deltas: AsyncIterator[NewTokens], codec: Codec, event: Callable[[str, NewTokens], dict[str, object]]
) -> AsyncIterator[str]:
    """Server-sent events. A character whose bytes are in several tokens is sent with the last of them."""
    ids: list[int] = []
    sent = ""
    async for delta in deltas:
        ids += delta.token_ids
        text = codec.decode(ids)
        if delta.finish is None:
            text = text.rstrip("\ufffd")
        yield f"data: {json.dumps(event(text[len(sent) :], delta))}\n\n"
        sent = text
    yield "data: [DONE]\n\n"
