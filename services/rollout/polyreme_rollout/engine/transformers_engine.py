"""A Hugging Face model as an inference engine, in this process, on any device that torch knows (it loads torch_npu itself). Slow
and exact: for tests, for models that vLLM does not serve, and for machines without vLLM.

Invariant: one thread computes, one step at a time; requests that arrive together are a cohort and share its steps. A load
computes all caches again, so no token depends on weights that were replaced.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import xxhash
from fastapi import FastAPI

from polyreme.config.run import RunConfig
from polyreme.process.quick_imports import quick_imports
from polyreme.weights.arena import ArenaError
from polyreme.weights.manifest import ArenaSource
from polyreme_rollout.engine.arena_cache import ArenaCache
from polyreme_rollout.engine.cohort import Cohort, CohortRow
from polyreme_rollout.engine.named_tensors import named_tensors
from polyreme_rollout.engine.plain_openai import TokenizerCodec, make_openai_app
from polyreme_rollout.engine.protocol import (
    CHUNK_TOKENS,
    EngineDeadError,
    EngineRequest,
    LoadError,
    LoadResult,
    NewTokens,
    Slept,
    TensorDigest,
    TopTokens,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")
MAX_COHORTS = 4
"""Cohorts beyond this number are computed again as one: each costs a pass of the model per step."""


def start(config: RunConfig, model_dir: Path, random_weights: bool = True) -> "TransformersEngine":
    """An `EngineFactory`."""
    torch.set_num_threads(config.rollout.transformers.threads)
    dtype = getattr(torch, config.model.dtype)
    with quick_imports():
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        if random_weights:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir), dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    rollout = config.rollout
    return TransformersEngine(
        model.eval().to(config.device), model_dir, config.device, rollout.max_model_len, rollout.max_num_seqs, config.data.date
    )


class TransformersEngine:
    """An `InferenceEngine`, created by `start`. `day`: the day that chat templates show; None: today."""

    reports_routes = False

    def __init__(
        self, model: Any, model_dir: Path, device: str, max_model_len: int, max_num_seqs: int, day: date | None = None
    ) -> None:
        import transformers

        self.name = f"transformers {transformers.__version__}"
        self.max_model_len, self.vocab_size = max_model_len, int(model.config.get_text_config().vocab_size)
        self.weight_names: frozenset[str] = frozenset()
        self._model, self._model_dir, self._device, self._day = model, model_dir, device, day
        self._room = asyncio.Semaphore(max_num_seqs)
        self._arriving: list[CohortRow] = []
        self._cohorts: list[Cohort] = []
        self._running, self._work, self._stepped = asyncio.Event(), asyncio.Event(), asyncio.Condition()
        self._running.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._steps: asyncio.Task[None] | None = None
        self._arenas = ArenaCache(device)
        self._error = ""

    @property
    def dead(self) -> bool:
        return bool(self._error)

    async def open(self) -> None:
        self._check_alive()
        self.weight_names = frozenset(await self._compute(_weight_names, self._model))
        self._steps = asyncio.create_task(self._step_forever(), name="steps of the model")

    async def generate(self, request: EngineRequest) -> AsyncIterator[NewTokens]:
        async with self._room:
            row, start, delivered = CohortRow(request, list(request.prompt_ids)), len(request.prompt_ids), 0
            self._arriving.append(row)
            self._work.set()
            finish: str | None = None
            try:
                while finish is None:
                    end, finish = await self._state(row, delivered + CHUNK_TOKENS)
                    yield NewTokens(row.ids[start + delivered : start + end], row.logprobs[delivered:end], finish)
                    delivered = end
            finally:
                row.closed = True

    async def _state(self, row: CohortRow, tokens: int) -> tuple[int, str | None]:
        """The state of a row that has this many tokens or has ended. Raises EngineDeadError."""
        async with self._stepped:
            await self._stepped.wait_for(lambda: self.dead or row.state[1] is not None or row.state[0] >= tokens)
        self._check_alive()
        return row.state

    async def logprobs(self, ids: Sequence[int], salt: str) -> Sequence[float]:
        self._check_alive()
        return await self._compute(_logprobs, self._model, ids)

    async def top_logprobs(self, ids: Sequence[int], count: int, salt: str) -> Sequence[TopTokens]:
        self._check_alive()
        return await self._compute(_top_logprobs, self._model, ids, count)

    async def pause(self) -> None:
        self._check_alive()
        self._running.clear()
        await self._compute(_nothing)  # after the step that is being computed

    async def load(self, sources: Sequence[ArenaSource]) -> LoadResult:
        asked = time.perf_counter()
        await self.pause()
        try:
            self._model = await self._compute(self._loaded, sources)
        except (ArenaError, LoadError, OSError, ValueError, RuntimeError) as error:
            raise LoadError(f"{type(error).__name__}: {error}") from None
        rows = [row for cohort in self._cohorts for row in cohort.rows]
        return LoadResult(
            asked, time.perf_counter() - asked, {row.request.request_id: row.state[0] for row in rows if row.running}
        )

    def _loaded(self, sources: Sequence[ArenaSource]) -> object:
        """The model with the weights of a version, which transformers converts from the files' names and shapes."""
        with named_tensors(sources, self._arenas) as tensors, torch.no_grad():
            model, notes = type(self._model).from_pretrained(
                None,
                config=self._model.config,
                state_dict={name: tensor.clone() for name, tensor in tensors.items()},
                dtype=self._model.dtype,
                output_loading_info=True,
            )
        if wrong := {kind: sorted(notes[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if notes[kind]}:
            raise LoadError(f"expected exactly the tensors of the model; found {wrong}")
        for cohort in self._cohorts:
            cohort.forget()
        return model.eval().to(self._device)

    async def resume(self) -> None:
        self._check_alive()
        self._running.set()

    async def sleep(self) -> Slept:
        self._check_alive()
        if self._device == "cpu":
            return Slept(0, weights=True, cache=True)
        return Slept(await self._compute(self._leave_device), weights=True, cache=False)

    def _leave_device(self) -> int:
        memory = getattr(torch, self._device)
        before = int(memory.memory_reserved())
        self._model.to("cpu")
        for cohort in self._cohorts:
            cohort.forget()
        memory.empty_cache()
        return before - int(memory.memory_reserved())

    async def wake(self) -> None:
        self._check_alive()
        await self._compute(self._model.to, self._device)

    async def openai_app(self, served_name: str, salt: Callable[[], Awaitable[str]]) -> FastAPI:
        codec = await asyncio.to_thread(TokenizerCodec.of, self._model_dir, self._day)
        return make_openai_app(self, served_name, salt, codec)

    async def weight_digests(self) -> Sequence[Mapping[str, TensorDigest]]:
        self._check_alive()
        return [await self._compute(_digests, self._model)]

    def close(self) -> None:
        self._error = self._error or "it was closed"
        if self._steps is not None:
            self._steps.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._arenas.close()

    async def _step_forever(self) -> None:
        """Computes steps while there are rows. An error of the model ends the engine."""
        try:
            while True:
                await self._running.wait()
                if not self._arriving and not self._cohorts:
                    self._work.clear()
                    await self._work.wait()
                    continue
                if self._arriving:
                    self._cohorts.append(Cohort(self._arriving))
                    self._arriving = []
                await self._compute(self._step)
                async with self._stepped:
                    self._stepped.notify_all()
        except Exception as error:  # noqa: BLE001 - every request fails with it
            self._error = f"{type(error).__name__}: {error}"
            async with self._stepped:
                self._stepped.notify_all()

    def _step(self) -> None:
        if not self._running.is_set():  # a pause came before this step
            return
        if len(self._cohorts) > MAX_COHORTS:
            self._cohorts = [Cohort([row for cohort in self._cohorts for row in cohort.rows])]
        for cohort in self._cohorts:
            cohort.step(self._model)
        self._cohorts = [cohort for cohort in self._cohorts if any(row.running for row in cohort.rows)]

    async def _compute(self, function: Callable[..., T], *arguments: object) -> T:
        """The result of a function in the thread of the model."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _check_alive(self) -> None:
        if self.dead:
            raise EngineDeadError(f"the transformers engine is dead: {self._error}")


def _nothing() -> None:
    """A place in the queue of the model's thread."""


def _weight_names(model: "PreTrainedModel") -> list[str]:
    """The names of the model's tensors in its files, without aliases."""
    from transformers.core_model_loading import revert_weight_conversion

    aliases = set(model.all_tied_weights_keys)
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in aliases}
    return list(revert_weight_conversion(model, tensors))


@torch.inference_mode()
def _rows(model: "PreTrainedModel", ids: Sequence[int]) -> torch.Tensor:
    """The log-probabilities of all tokens after each of ids[:-1], float32 [n - 1, vocabulary]."""
    tokens = torch.tensor([list(ids)], device=model.device)
    return model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)


def _logprobs(model: "PreTrainedModel", ids: Sequence[int]) -> list[float]:
    rows = _rows(model, ids)
    wanted = torch.tensor(list(ids[1:]), device=rows.device)
    return [float(value) for value in rows.gather(-1, wanted[:, None])[:, 0].tolist()]


def _top_logprobs(model: "PreTrainedModel", ids: Sequence[int], count: int) -> list[list[tuple[int, float]]]:
    values, tokens = _rows(model, ids).topk(count, dim=-1)
    return [list(zip(*row, strict=True)) for row in zip(tokens.tolist(), values.tolist(), strict=True)]


@torch.no_grad()
def _digests(model: "PreTrainedModel") -> dict[str, TensorDigest]:
    """See `InferenceEngine.weight_digests`."""
    return {
        name: TensorDigest(
            tuple(tensor.shape),
            xxhash.xxh3_64_intdigest((tensor.cpu() + 0.0).contiguous().reshape(-1).view(torch.uint8).numpy().data),
        )
        for name, tensor in model.state_dict().items()
    }
