"""The vLLM engine: AsyncLLM in this process, its engine core and workers in child processes.

Invariant: the child processes have their own process group and die with this process, however it ends; each token comes with
its log-probability under the distribution it was sampled from; only `load` changes weights; no request, of Generate or of /v1,
shares cached prefixes with requests of other weights; `logprobs` waits for no other request.

Supports vLLM 0.23 to 0.32, so it does not use the weight versions and weight transfer of newer releases.
"""

import asyncio
import datetime
import itertools
import logging
import multiprocessing
import os
import secrets
import signal
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import psutil  # type: ignore[import-untyped]
from fastapi import FastAPI

from polyreme.config.run import RunConfig
from polyreme.net.endpoint import interface_of
from polyreme.net.ports import loopback
from polyreme.process.gloo_device import share_gloo_device
from polyreme.process.lifecycle import die_with_parent
from polyreme.process.quick_imports import quick_imports
from polyreme.weights.manifest import ArenaSource
from polyreme_rollout.engine.protocol import (
    EngineDeadError,
    EngineRequest,
    LoadError,
    LoadResult,
    NewTokens,
    ServedAdapter,
    Slept,
    TensorDigest,
    TopTokens,
)
from polyreme_rollout.engine.scheduler import IN_CHUNKS, extend_scheduler
from polyreme_rollout.engine.vllm_arguments import engine_arguments
from polyreme_rollout.engine.vllm_environment import PASSED, check_sleep, engine_environment, foreign
from polyreme_rollout.engine.vllm_openai import make_openai_app

if TYPE_CHECKING:
    from vllm.logprobs import Logprob
    from vllm.lora.request import LoRARequest

LOAD_TIMEOUT = 600.0
SHUTDOWN_TIMEOUT = 10.0
FIRST_LORA = 1 << 20
"""The number of the first adapter. vLLM gives the lowest numbers to those of its own that it runs as it starts."""
KNOWN_LORAS = 10_000
"""Adapters whose numbers are remembered. An older one is loaded again under a new number."""

_WORKERS_MEMORY = "/dev/shm/vllm_dist_"  # shared by the tensor-parallel group on CPU

logger = logging.getLogger(__name__)
T = TypeVar("T")


def start(config: RunConfig, model_dir: Path, random_weights: bool = True) -> "VllmEngine":
    """An `EngineFactory`: starts vLLM. It forks."""
    if sleeps := config.placement == "colocated" and config.device != "cpu":
        check_sleep(os.environ)
    _prepare_environment(config)
    with quick_imports():
        import torch
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.envs import enable_envs_cache
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        from polyreme_rollout.engine.cpu_norms import register_norms

    on_cpu = config.device == "cpu"
    seed = secrets.randbits(
        31
    )  # a replica that repeats another one's answers would be counted twice by an evaluation over a gateway
    arguments = engine_arguments(config, model_dir, random_weights, seed) | (register_norms() if on_cpu else {})
    if on_cpu and "max_loras" in arguments:
        from polyreme_rollout.engine.cpu_adapters import register_adapters

        register_adapters()
    vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
    extend_scheduler(vllm_config.scheduler_config)
    if on_cpu:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # spawned processes would spend seconds on imports
        share_gloo_device(torch.distributed.ProcessGroupGloo)
        torch.set_num_threads(config.rollout.vllm.threads)  # forked processes inherit it, also when torch was imported before
    with _children_die_with_parent():
        llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
    enable_envs_cache()  # vLLM's engine process does so too; otherwise each request reads variables, for a tenth of its time here
    return VllmEngine(llm, SamplingParams, config.rollout.vllm.sleep_level if sleeps else None, config.data.date)


class VllmEngine:
    """vLLM behind `InferenceEngine`, created by `start`.

    Args:
        sleep_level: vLLM's level; None: it keeps its memory.
        day: the day that chat templates show; None: today.
    """

    reports_routes = False  # on CPU, vLLM itself does not report them

    def __init__(self, llm: Any, sampling_params: Any, sleep_level: int | None = None, day: datetime.date | None = None) -> None:
        import vllm
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        self.name = f"vllm {vllm.__version__}"
        self.max_model_len = int(llm.model_config.max_model_len)
        self.vocab_size = int(llm.model_config.get_vocab_size())
        self.weight_names: frozenset[str] = frozenset()
        self.llm, self._dead_error = llm, VllmDeadError
        self._sleep_level, self._asleep = sleep_level, False
        self._day = day
        lora = llm.vllm_config.lora_config
        self.max_loras, self.max_lora_rank = (0, 0) if lora is None else (int(lora.max_loras), int(lora.max_lora_rank))
        self._lora_ids, self._numbers = dict[str, int](), itertools.count(FIRST_LORA)
        # The core then handles calls in order and between two steps, so a load may follow a pause that has not been answered.
        self._steps_end_first = not llm.vllm_config.scheduler_config.async_scheduling and self._pauses_at_once
        self._sampling_params, self._delta = sampling_params, RequestOutputKind.DELTA
        # No deep copy of parameters that belong to one request: only newer releases make one.
        self._newer = {"skip_clone": True} if "skip_clone" in sampling_params.__struct_fields__ else {}
        self._processes = {child.pid: child for child in multiprocessing.active_children() if child.pid}

    async def open(self) -> None:
        _unname_shared_memory(self._processes)
        await self._call(self.llm.collective_rpc("polyreme_prepare"))
        names = await self._call(self.llm.collective_rpc("polyreme_weight_names"))
        self.weight_names = frozenset(name for worker in names for name in worker)

    async def generate(self, request: EngineRequest) -> AsyncIterator[NewTokens]:
        sampling = request.sampling
        params = self._sampling_params(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed,
            max_tokens=request.max_new,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # only the request's stop ids end it
            logprobs=0,  # the sampled token's
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._delta,
            extra_args=IN_CHUNKS,
            **self._newer,
        )
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids), "cache_salt": request.salt}
        outputs = self.llm.generate(prompt, params, request.request_id, lora_request=self._lora_request(request.adapter))
        try:
            async for output in outputs:
                completion = output.outputs[0]
                if completion.finish_reason not in (None, "stop", "length"):
                    raise EngineDeadError(f"vLLM ended a request with {completion.finish_reason!r}")
                yield NewTokens(completion.token_ids, completion.logprobs.logprobs, completion.finish_reason)
        except self._dead_error as error:
            raise EngineDeadError(f"vLLM's engine has exited: {error}") from None
        finally:
            await outputs.aclose()

    async def load_adapter(self, adapter: ServedAdapter) -> None:
        try:
            await self._call(self.llm.add_lora(self._lora_request(adapter)))
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001 - the core passes on its worker's errors without their types
            raise LoadError(f"{type(error).__name__}: {error}") from None

    def _lora_request(self, adapter: ServedAdapter | None) -> "LoRARequest | None":
        """vLLM's name of an adapter. One that has been forgotten gets another number."""
        from vllm.lora.request import LoRARequest

        if adapter is None:
            return None
        number = self._lora_ids.pop(adapter.name, None) or next(self._numbers)
        self._lora_ids[adapter.name] = number
        if len(self._lora_ids) > KNOWN_LORAS:
            del self._lora_ids[next(iter(self._lora_ids))]
        return LoRARequest(adapter.name, number, str(adapter.folder))

    async def logprobs(self, ids: Sequence[int], salt: str, adapter: ServedAdapter | None = None) -> Sequence[float]:
        rows = await self._prompt_logprobs(ids, 0, salt, adapter)
        return [row[token].logprob for token, row in zip(ids[1:], rows, strict=True)]

    async def top_logprobs(
        self, ids: Sequence[int], count: int, salt: str, adapter: ServedAdapter | None = None
    ) -> Sequence[TopTokens]:
        rows = await self._prompt_logprobs(ids, count, salt, adapter)
        ranked = [sorted((value.rank, token, value.logprob) for token, value in row.items()) for row in rows]
        # A prompt's own token may be a further one.
        return [[(token, logprob) for _, token, logprob in row[:count]] for row in ranked]

    async def _prompt_logprobs(
        self, ids: Sequence[int], count: int, salt: str, adapter: ServedAdapter | None
    ) -> "Sequence[Mapping[int, Logprob]]":
        """vLLM's log-probabilities of each of ids[1:], and of the `count` most likely tokens at its place."""
        # The engine computes log-probabilities of a prompt before any temperature. It samples at least one token.
        params = self._sampling_params(temperature=0.0, max_tokens=1, prompt_logprobs=count, detokenize=False)
        prompt = {"type": "token", "prompt_token_ids": list(ids), "cache_salt": salt}
        name, lora = f"polyreme-logprobs-{uuid.uuid4().hex}", self._lora_request(adapter)
        outputs = self.llm.generate(prompt, params, name, lora_request=lora, priority=-1)
        try:
            rows: Sequence[Mapping[int, Logprob]] = [answer.prompt_logprobs async for answer in outputs][-1]
        except self._dead_error as error:
            raise EngineDeadError(f"vLLM's engine has exited: {error}") from None
        finally:
            await outputs.aclose()
        return rows[1:]

    @property
    def _pauses_at_once(self) -> bool:
        return hasattr(self.llm.engine_core, "pause_scheduler_async")

    async def pause(self) -> None:
        if self._pauses_at_once:
            await self._call(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False))
        else:  # the public call does the same, then sleeps
            await self._call(self.llm.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        if self._asleep:
            await self._call(self.llm.wake_up(tags=["kv_cache"]))
            self._asleep = False
        await self._call(self.llm.resume_generation())

    async def sleep(self) -> Slept:
        if self._sleep_level is None:  # on CPU, vLLM frees nothing, although it reports that it sleeps
            return Slept(0, weights=True, cache=True)
        before = await self._free_bytes()
        self._asleep = True
        await self._call(self.llm.sleep(level=self._sleep_level, mode="keep"))
        return Slept(await self._free_bytes() - before, weights=self._sleep_level == 1, cache=False)

    async def wake(self) -> None:
        if self._asleep:
            await self._call(self.llm.wake_up(tags=["weights"]))

    async def _free_bytes(self) -> int:
        """Free memory of all devices of this replica, in bytes."""
        return sum(await self._call(self.llm.collective_rpc("polyreme_free_bytes")))

    async def load(self, sources: Sequence[ArenaSource]) -> LoadResult:
        parts = [
            (source.path, source.nonce, source.slot, source.generation, source.manifest.to_proto().SerializeToString())
            for source in sources
        ]
        asked = time.perf_counter()
        pausing = asyncio.ensure_future(self.pause())
        if not self._steps_end_first:
            await pausing
        loading = self._call(self.llm.collective_rpc("polyreme_load", args=(parts,)))
        try:
            _, answers = await asyncio.gather(pausing, asyncio.wait_for(loading, LOAD_TIMEOUT))
        except TimeoutError:
            raise LoadError(f"expected an answer of every worker within {LOAD_TIMEOUT:.0f} s; found none") from None
        errors = [f"worker {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        for answer in answers:
            if "error" in answer:
                logger.debug("%s", answer["traceback"])
        if errors:
            raise LoadError("; ".join(errors))
        # The core appends a random suffix to our ids since vLLM 0.14.
        sampled = {id.partition("-")[0]: count for id, count in answers[0]["sampled"].items()}
        stopped = min(answer["started"] for answer in answers) if self._steps_end_first else asked
        return LoadResult(stopped, max(answer["seconds"] for answer in answers), sampled)

    @property
    def dead(self) -> bool:
        return self.llm is None or bool(self.llm.errored)

    async def openai_app(self, served_name: str, salt: Callable[[], Awaitable[str]]) -> FastAPI:
        return await make_openai_app(self.llm, served_name, salt, self._day)

    async def weight_digests(self) -> Sequence[Mapping[str, TensorDigest]]:
        answers = await self._call(self.llm.collective_rpc("polyreme_digests"))
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise LoadError(f"worker {rank}: {answer['error']}")
        return [
            {name: TensorDigest(tuple(shape), digest) for name, (shape, digest) in answer["weights"].items()}
            for answer in answers
        ]

    def close(self) -> None:
        if self.llm is None:
            return
        started = time.perf_counter()
        llm, self.llm = self.llm, None
        # Workers have shared memory to remove. One process only has memory to free: for Python a second, for the kernel no time.
        alone = llm.vllm_config.parallel_config.world_size == 1
        if alone:
            logging.getLogger("vllm.v1.utils").setLevel(logging.ERROR)  # it warns of a process that it kills
        llm.shutdown(timeout=0.0 if alone else SHUTDOWN_TIMEOUT)
        llm.shutdown = _do_nothing  # its finalizer calls it again, and fails during interpreter shutdown
        logger.debug("vLLM shut down in %.1f s", time.perf_counter() - started)
        for pid, process in self._processes.items():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            process.join(SHUTDOWN_TIMEOUT)

    async def _call(self, awaitable: Awaitable[T]) -> T:
        try:
            return await awaitable
        except self._dead_error as error:
            raise EngineDeadError(f"vLLM's engine has exited: {error}") from None


def _do_nothing() -> None:
    """Replaces the shutdown of an engine that is shut down already."""


def _prepare_environment(config: RunConfig) -> None:
    """Sets the variables that vLLM and torch read at their import, here and in forked processes, and removes all their others."""
    if unwanted := foreign(os.environ):
        logger.warning("not passed to the engine: %s (name in %s what it needs)", ", ".join(unwanted), PASSED)
    host = loopback()
    wanted = engine_environment(config, os.environ, host, interface_of(host))
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    os.environ.update(wanted)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


@contextmanager
def _children_die_with_parent() -> Iterator[None]:
    """Processes forked in the block, and their descendants, die with their parents. Direct children lead a process group each."""
    service, parent, armed = os.getpid(), [0], [True]

    def before() -> None:
        parent[0] = os.getpid()

    def in_child() -> None:
        if armed[0]:
            die_with_parent(parent[0])
            if parent[0] == service:
                os.setpgid(0, 0)

    os.register_at_fork(before=before, after_in_child=in_child)  # permanent: Python cannot unregister it
    try:
        yield
    finally:
        armed[0] = False


def _unname_shared_memory(pids: Iterable[int]) -> None:
    """Unlinks the workers' shared memory. The mapping lives as long as the workers, so even a kill leaves nothing behind."""
    for pid in pids:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            for mapping in process.memory_maps():
                if mapping.path.startswith(_WORKERS_MEMORY):
                    Path(mapping.path).unlink(missing_ok=True)
