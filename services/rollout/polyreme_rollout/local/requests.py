"""The sampler of the training service: answers the requests of its log with an inference engine.

Where the engine takes an adapter with each request, those of several models run together on the base model, as many as it has
room for. Any other model is loaded alone: its requests run together. A request whose model has no room waits until running ones
have ended, and no later one starts before it.

Invariant: an answer depends on its request alone. So a request that is executed again after a restart has the same answer, up to
the engine's rounding.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme.experience.open_requests import OpenRequests
from polyreme.experience.requests import MAX_BEGUN, LogPlace, RequestLog, in_turns, tenant_in
from polyreme.process.tasks import end_all
from polyreme_rollout.engine.protocol import (
    EngineRequest,
    InferenceEngine,
    LoadError,
    Sampling,
    ServedAdapter,
    ServesAdapters,
    TopTokens,
)
from polyreme_rollout.local.report import SamplerReport
from polyreme_rollout.local.sample_request import SampleRequest, admitted, fitting

if TYPE_CHECKING:
    from polyreme_rollout.local.weights import SavedWeights

MAX_RUNNING = 1024
"""Most samples that run at once, unless one request asks for more: the engine takes them in the order in which they arrive, so a
tenant with one request waits behind as many of the others."""
MAX_VERSIONS = 4
"""How often an adapter is loaded again that is saved again while it is loaded."""

_NO_LOGPROB = -99999.0


class Running(NamedTuple):
    """A running request: its id, the directory of the adapter that the engine uses for it, and the number of its samples."""

    id: str
    adapter: Path | None
    samples: int


class ServedSampler:
    """Answers requests until `stop` is set.

    Args:
        log, engine, weights: the request log, an open engine, and what writes models for it.
        stop_ids: tokens that end an answer when the request names none.
        decode: token ids -> text, special tokens included.
    """

    def __init__(
        self,
        log: RequestLog,
        engine: InferenceEngine,
        weights: "SavedWeights",
        stop_ids: tuple[int, ...],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        self._log, self._engine, self._weights, self._stop_ids, self._decode = log, engine, weights, stop_ids, decode
        self._adapters = engine if isinstance(engine, ServesAdapters) and engine.max_loras else None
        self._loaded: str | None = None
        self._loads = self._asked = 0
        self._requests: dict[str, SampleRequest] = {}
        self._running: dict[asyncio.Task[None], Running] = {}
        self._loading: dict[ServedAdapter, asyncio.Task[None]] = {}  # of running requests; the engine keeps them as long
        self._report = SamplerReport(log.records, decode)

    async def run(self, stop: asyncio.Event) -> None:
        """Raises EngineDeadError or StoreError when it cannot continue."""
        try:
            async with OpenRequests.of(self._log, "sampler") as requests:
                look = True
                while not stop.is_set():
                    held = look and await self._start_waiting(requests)
                    look = await requests.news(self._running) or held
                    for task in [each for each in self._running if each.done()]:
                        del self._running[task]
                        task.result()  # raises
                    busy = {each.adapter for each in self._running.values()}
                    self._loading = {adapter: load for adapter, load in self._loading.items() if adapter.folder in busy}
                    if self._report.is_due or not self._running:
                        await self._report.send()
            await self._report.send()
        finally:
            await end_all([*self._running, *self._loading.values()])

    async def _start_waiting(self, requests: OpenRequests) -> bool:
        """Starts the requests whose model is loaded or has room, or loads the model of the first one when nothing runs. Returns
        whether others wait until running ones have ended."""
        started = {each.id for each in self._running.values()}
        await requests.look()
        waiting = in_turns([place for place in requests.places if place.id not in started])
        ids = {place.id for place in waiting}
        self._requests = {id: request for id, request in self._requests.items() if id in ids}
        new = [place for place in waiting[:MAX_RUNNING] if place.id not in self._requests]
        for place, payload in zip(new, await requests.take(new), strict=True):
            self._requests[place.id] = SampleRequest.unpack(payload)
        while waiting and self._needs(self._requests[waiting[0].id]) != self._loaded:
            if self._running:
                return True
            if await self._load(waiting[0]):
                break
            waiting = waiting[1:]
        ready = [place for place in waiting if self._can_run(place)]
        busy_samples = sum(each.samples for each in self._running.values())
        ready = ready[: fitting([self._requests[place.id].load for place in ready], busy_samples, MAX_RUNNING)]
        adapters = [self._adapter(self._requests[place.id]) for place in ready]
        busy = {each.adapter for each in self._running.values() if each.adapter is not None}
        chosen = admitted(adapters, busy, 0 if self._adapters is None else self._adapters.max_loras)
        begun = await self._log.begin([ready[number] for number in chosen])
        for number, count in zip(chosen, begun, strict=True):
            place = ready[number]
            request = self._requests.pop(place.id)
            task = asyncio.create_task(self._answer(place, request, count))
            self._running[task] = Running(place.id, adapters[number], request.load)
        return len(chosen) < len(waiting)

    def _can_run(self, place: LogPlace) -> bool:
        """Whether what a request needs is loaded."""
        request = self._requests.get(place.id)
        return request is not None and self._needs(request) == self._loaded

    def _needs(self, request: SampleRequest) -> str | None:
        """The files that have to be loaded for a request: None for the base model, on which also adapters run."""
        return None if self._adapter(request) is not None else request.files

    def _adapter(self, request: SampleRequest) -> Path | None:
        """The directory of the adapter with which the engine answers a request."""
        if self._adapters is None or request.weights is None or not 0 < request.rank <= self._adapters.max_lora_rank:
            return None
        return Path(request.weights)

    async def _load_adapter(self, request: SampleRequest) -> ServedAdapter | None:
        """Loads the newest version of a request's adapter. Raises OSError, LoadError, EngineDeadError."""
        folder = self._adapter(request)
        if self._adapters is None or folder is None:
            return None
        for _ in range(MAX_VERSIONS):
            adapter = ServedAdapter.newest(folder)
            if (load := self._loading.get(adapter)) is None or (load.done() and load.exception() is not None):
                load = self._loading[adapter] = asyncio.create_task(self._adapters.load_adapter(adapter))
            await asyncio.shield(load)
            if ServedAdapter.newest(folder) == adapter:  # else the engine may have read other files
                return adapter
        raise LoadError(f"files that were replaced {MAX_VERSIONS} times while they were loaded")

    async def _load(self, place: LogPlace) -> bool:
        """Loads the model of a request. Returns False, and answers the request with an error, when it cannot be loaded."""
        request = self._requests[place.id]
        wanted, weights = self._needs(request), request.weights
        if not await self._log.attempt(attempt := f"{tenant_in(place.id)} {wanted}"):
            lost = f"the sampler ended {MAX_BEGUN} times while it loaded these weights; see its log"
            await self._log.finish(place, _failure(lost, "server"))
            return False
        try:
            source = await asyncio.to_thread(self._weights.write, None if wanted is None or weights is None else Path(weights))
            await self._engine.load([source])
        except (OSError, KeyError, ValueError, LoadError) as error:
            self._loaded = ""  # arena and engine may hold a mixture
            await self._log.end_attempt(attempt)
            await self._log.finish(place, _unloadable(weights, error))
            return False
        await self._engine.resume()
        await self._log.end_attempt(attempt)
        self._loads += 1
        self._loaded = wanted
        return True

    async def _answer(self, place: LogPlace, request: SampleRequest, begun: int) -> None:
        """Stores the answer to a request that has begun `begun` times."""
        room = self._engine.max_model_len - len(request.prompt)
        vocabulary = self._engine.vocab_size
        if room < 1:
            problem = f"expected a prompt of at most {self._engine.max_model_len - 1} tokens; found {len(request.prompt)}"
        elif not request.prompt or not all(0 <= id < vocabulary for id in request.prompt):
            problem = f"expected a prompt of token ids from 0 to {vocabulary - 1}; found others, or none"
        elif begun > MAX_BEGUN:
            lost = f"the sampler ended {begun - 1} times while it answered this request; see its log"
            await self._log.finish(place, _failure(lost, "server"))
            return
        else:
            began = time.time()
            try:
                with self._report.busy():
                    answer = await self._sample(place, request, room)
            except (OSError, LoadError) as error:
                await self._log.finish(place, _unloadable(request.weights, error))
                return
            await self._log.finish(place, b"P" + answer.SerializeToString())
            if not request.is_scoring:
                self._report.add(place, request.weights, request.prompt, began, answer)
            return
        await self._log.finish(place, _failure(problem))

    async def _sample(self, place: LogPlace, request: SampleRequest, room: int) -> pb.SampleResponse:
        adapter = await self._load_adapter(request)
        salt = f"{self._loads} {request.weights if adapter is None else adapter.name}"
        parts = [self._sequence(place, request, number, room, salt, adapter) for number in range(request.samples)]
        answer = pb.SampleResponse(sequences=await asyncio.gather(*parts))
        unscored = max(1, len(request.prompt) - (request.prompt_logprobs_last or len(request.prompt)))
        if request.prompt_logprobs:
            values = np.array([np.nan, *await self._logprobs(request.prompt, salt, adapter)], "<f4")
            values[:unscored] = np.nan
            answer.prompt_logprobs = values.tobytes()
        if request.topk:
            rows = await self._top_logprobs(request.prompt, request.topk, salt, adapter)
            answer.topk_prompt_logprobs.CopyFrom(_matrices(rows[unscored - 1 :], len(request.prompt), request.topk))
        return answer

    async def _logprobs(self, ids: Sequence[int], salt: str, adapter: ServedAdapter | None) -> Sequence[float]:
        if self._adapters is None:
            return await self._engine.logprobs(ids, salt)
        return await self._adapters.logprobs(ids, salt, adapter)

    async def _top_logprobs(
        self, ids: Sequence[int], count: int, salt: str, adapter: ServedAdapter | None
    ) -> Sequence[TopTokens]:
        if self._adapters is None:
            return await self._engine.top_logprobs(ids, count, salt)
        return await self._adapters.top_logprobs(ids, count, salt, adapter)

    async def _sequence(
        self, place: LogPlace, request: SampleRequest, number: int, room: int, salt: str, adapter: ServedAdapter | None
    ) -> pb.SampledSequence:
        """One answer. A stop token or the token that completes a stop string is its last."""
        stop_ids = self._stop_ids if request.stop_ids is None else tuple(request.stop_ids)
        sampling = Sampling(request.temperature, request.top_p, request.top_k or -1, stop_ids)
        origin = place.id if request.seed is None else str(request.seed)
        seed = xxhash.xxh3_64_intdigest(f"{origin} {number}".encode()) >> 1
        self._asked += 1
        longest = min(room, request.max_tokens or room)
        ask = EngineRequest(str(self._asked), list(request.prompt), longest, seed, salt, sampling, adapter)
        ids, logprobs, finish = list[int](), list[float](), None
        tokens = self._engine.generate(ask)
        async for new in tokens:
            before = len(ids)
            ids += new.token_ids
            logprobs += new.logprobs
            finish = new.finish
            if (end := self._stop_at(ids, before, request.stop_strings)) is not None:
                ids, logprobs, finish = ids[:end], logprobs[:end], "stop"
                break
        await tokens.aclose()  # type: ignore[attr-defined]
        reason = pb.STOP_REASON_STOP if finish == "stop" else pb.STOP_REASON_LENGTH
        arrays = {"tokens": np.array(ids, "<i4").tobytes(), "logprobs": np.array(logprobs, "<f4").tobytes()}
        return pb.SampledSequence(stop_reason=reason, **arrays)

    def _stop_at(self, ids: Sequence[int], before: int, stops: Sequence[str]) -> int | None:
        """The number of tokens up to the first one that completes a stop string, of those from `before` on."""
        if not stops:
            return None
        window = 4 * max(map(len, stops)) + 4  # a character has at most four tokens
        for end in range(before + 1, len(ids) + 1):
            text = self._decode(ids[max(0, end - window) : end])
            if any(stop in text for stop in stops):
                return end
        return None


def _matrices(rows: Sequence[TopTokens], length: int, count: int) -> pb.TopkLogprobs:
    """The most likely tokens of the last places of a prompt of `length` tokens."""
    tokens, logprobs = np.zeros((length, count), "<i4"), np.full((length, count), _NO_LOGPROB, "<f4")
    for place, row in enumerate(rows, start=length - len(rows)):
        tokens[place, : len(row)] = [token for token, _ in row]
        logprobs[place, : len(row)] = [value for _, value in row]
    return pb.TopkLogprobs(token_ids=tokens.tobytes(), logprobs=logprobs.tobytes(), k=count, length=length)


def _unloadable(weights: str | None, error: Exception) -> bytes:
    """The result of a request whose model cannot be loaded."""
    expected = f"expected weights that the sampler can load in {Path(weights or '').name}; found {error}. Save them again."
    return _failure(expected, "server")


def _failure(message: str, category: str = "user") -> bytes:
    return b"J" + json.dumps({"error": message, "category": category}).encode()
