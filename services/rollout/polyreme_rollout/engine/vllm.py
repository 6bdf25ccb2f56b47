"""vLLM as an engine: AsyncLLM in this process, its core and workers in processes of their own.

Kept here: those processes are in a process group of their own and die with this one, however it ends; a request's tokens come
with the log-probability of the distribution they were sampled from; weights come only by `load`; no request, of Generate or /v1,
shares cached prefixes with those of other weights.

Written for vLLM 0.23 to 0.32: no use of the newer releases' own weight versions and transfer.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from polyreme.config.run import RunConfig
from polyreme.process.lifecycle import die_with_parent
from polyreme_rollout.engine.base import ArenaSource, Delta, EngineDeadError, EngineRequest, Loaded, LoadError
from polyreme_rollout.sequences import CHUNK_TOKENS

LOAD_SECONDS = 600.0
SHUTDOWN_SECONDS = 10.0
HTTP_SECONDS = 60.0  # for vLLM's HTTP application to be made, on the event loop
BATCHED_TOKENS = 8192  # of one step, prompts included

_WORKERS_MEMORY = "/dev/shm/vllm_dist_"  # of the tensor-parallel group on CPU

log = logging.getLogger(__name__)


def start(config: RunConfig, model_dir: Path) -> "VllmEngine":
    """Starts the engine with random weights. Call it in the main thread, before other threads and event loops: it forks.

    Args:
        model_dir: config and tokenizer files; no weights are read.
    """
    _prepare_environment(config)
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    rollout, on_cpu = config.rollout, config.device == "cpu"
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "load_format": "dummy",
        "dtype": config.model.dtype,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(BATCHED_TOKENS, rollout.max_model_len),
        "tensor_parallel_size": rollout.tensor_parallel,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "generation_config": "vllm",
        "seed": config.seed,
        "disable_log_stats": True,
        "worker_extension_cls": "polyreme_rollout.engine.worker.PolicyWorker",
    }
    if on_cpu:
        arguments |= {
            "enforce_eager": True,
            "kv_cache_memory_bytes": rollout.vllm.kv_cache_mib << 20,
            # A sampler with a seed cannot take back a draw on CPU, which half-read prompts need: they crash the engine.
            "enable_chunked_prefill": False,
        }
        if rollout.tensor_parallel == 1:
            # The worker in the core's process: no shared-memory hop per step, and nobody spins on it.
            arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    else:
        arguments["gpu_memory_utilization"] = rollout.vllm.gpu_memory_utilization
    vllm_config = AsyncEngineArgs(**arguments).create_engine_config()
    if on_cpu:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # spawned processes would import everything again, for seconds
        torch.set_num_threads(rollout.vllm.threads)  # forked processes inherit it, also when torch was imported before
    with _leashed():
        llm = AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)
    return VllmEngine(llm, SamplingParams, model_dir)


class VllmEngine:
    """See `engine.base.Engine`. Made by `start`; `open` completes it inside the event loop."""

    def __init__(self, llm: Any, sampling_params: Any, model_dir: Path) -> None:
        import vllm
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

        self.name = f"vllm {vllm.__version__}"
        self.max_model_len = int(llm.model_config.max_model_len)
        self.vocab_size = int(llm.model_config.get_vocab_size())
        self.weight_names: frozenset[str] = frozenset()
        self.llm, self._model_dir, self._dead_error = llm, model_dir, VllmDeadError
        self._sampling_params, self._delta = sampling_params, RequestOutputKind.DELTA
        # Outputs every CHUNK_TOKENS tokens, where vLLM can: one wake-up per chunk instead of one per token.
        self._interval = {"stream_interval": CHUNK_TOKENS} if "stream_interval" in sampling_params.__struct_fields__ else {}
        self._processes = {child.pid: child for child in multiprocessing.active_children() if child.pid}

    async def open(self) -> None:
        """Learns what the model is made of. Raises EngineDeadError."""
        _unname_shared_memory(self._processes)
        names = await self._call(self.llm.collective_rpc("polyreme_weight_names"))
        self.weight_names = frozenset(name for worker in names for name in worker)

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        sampling = request.sampling
        params = self._sampling_params(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed,
            max_tokens=request.max_new,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # the request says what ends it, and nobody else
            logprobs=0,  # the sampled token's
            flat_logprobs=True,
            detokenize=False,
            output_kind=self._delta,
            **self._interval,
        )
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt_ids), "cache_salt": request.salt}
        outputs = self.llm.generate(prompt, params, request.request_id)
        try:
            async for output in outputs:
                completion = output.outputs[0]
                if completion.finish_reason not in (None, "stop", "length"):
                    raise EngineDeadError(f"vLLM ended a request with {completion.finish_reason!r}")
                yield Delta(completion.token_ids, completion.logprobs.logprobs, completion.finish_reason)
        except self._dead_error as error:
            raise EngineDeadError(f"vLLM's engine is gone: {error}") from None
        finally:
            await outputs.aclose()

    async def pause(self) -> None:
        core = self.llm.engine_core
        if hasattr(core, "pause_scheduler_async"):
            await self._call(core.pause_scheduler_async(mode="keep", clear_cache=False))
        else:  # the public call does the same, and then sleeps
            await self._call(self.llm.pause_generation(mode="keep", clear_cache=False))

    async def resume(self) -> None:
        await self._call(self.llm.resume_generation())

    async def load(self, sources: Sequence[ArenaSource]) -> Loaded:
        parts = [
            (source.path, source.nonce, source.slot, source.generation, source.manifest.to_proto().SerializeToString())
            for source in sources
        ]
        try:
            answers = await self._call(asyncio.wait_for(self.llm.collective_rpc("polyreme_load", args=(parts,)), LOAD_SECONDS))
        except TimeoutError:
            raise LoadError(f"no answer from the workers within {LOAD_SECONDS:.0f} s") from None
        errors = [f"worker {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        for answer in answers:
            if "error" in answer:
                log.debug("%s", answer["traceback"])
        if errors:
            raise LoadError("; ".join(errors))
        # The core's own ids are ours, with a random ending since vLLM 0.14.
        sampled = {id.partition("-")[0]: count for id, count in answers[0]["sampled"].items()}
        return Loaded(max(answer["seconds"] for answer in answers), sampled)

    @property
    def dead(self) -> bool:
        return bool(self.llm.errored)

    async def openai_app(self, served_name: str, salt: Callable[[], Awaitable[str]]) -> Any:
        """vLLM's own HTTP application (ASGI) on this engine, with its OpenAI-compatible /v1.

        Args:
            salt: of what is submitted at the moment: see `EngineRequest`. A client's own `cache_salt` comes on top.
        """
        client = _SaltedClient(self.llm, salt)
        return await asyncio.to_thread(_openai_app, client, self._model_dir, served_name, asyncio.get_running_loop())

    def close(self) -> None:
        if self.llm is None:
            return
        started = time.perf_counter()
        llm, self.llm = self.llm, None
        llm.shutdown(timeout=SHUTDOWN_SECONDS)
        llm.shutdown = _nothing  # its finalizer calls it once more, and fails when the interpreter is half gone
        log.debug("vLLM shut down in %.1f s", time.perf_counter() - started)
        for pid, process in self._processes.items():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            process.join(SHUTDOWN_SECONDS)

    async def _call(self, awaitable: Any) -> Any:
        try:
            return await awaitable
        except self._dead_error as error:
            raise EngineDeadError(f"vLLM's engine is gone: {error}") from None


class _SaltedClient:
    """AsyncLLM as vLLM's HTTP application uses it; whatever it generates is salted."""

    def __init__(self, llm: Any, salt: Callable[[], Awaitable[str]]) -> None:
        self._llm, self._salt = llm, salt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def generate(self, prompt: Any, *arguments: Any, **keywords: Any) -> AsyncIterator[Any]:
        salt = await self._salt()
        if isinstance(prompt, dict):
            prompt = {**prompt, "cache_salt": f"{salt} {prompt.get('cache_salt') or ''}"}
        else:  # in older releases a request that is made already
            prompt.cache_salt = f"{salt} {prompt.cache_salt or ''}"
        outputs = self._llm.generate(prompt, *arguments, **keywords)
        try:
            async for output in outputs:
                yield output
        finally:
            await outputs.aclose()


def _nothing() -> None:
    """What is left to do for an engine that was shut down."""


def _prepare_environment(config: RunConfig) -> None:
    """Set before vLLM and torch are imported: they read it then, and so do the processes that are forked."""
    os.environ.update(
        VLLM_USE_V2_MODEL_RUNNER="0",  # PolicyWorker reads the token counts that the first model runner keeps
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about what is chosen here on purpose
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    if config.device == "cpu":
        os.environ.update(
            VLLM_CPU_OMP_THREADS_BIND="nobind",  # other processes of the run share these cores
            OMP_NUM_THREADS=str(config.rollout.vllm.threads),
            OMP_WAIT_POLICY="PASSIVE",
            TORCHDYNAMO_DISABLE="1",  # the sampler would be compiled, again for new batch sizes, for seconds in mid-generation
        )
    if config.device == "npu":
        os.environ["VLLM_ASCEND_ENABLE_NZ"] = "0"  # reloading needs weights in their plain format


@contextmanager
def _leashed() -> Iterator[None]:
    """Processes forked here, and all that they fork, die with their parents; the first lead a process group of their own."""
    service, parent, armed = os.getpid(), [0], [True]

    def before() -> None:
        parent[0] = os.getpid()

    def in_child() -> None:
        if armed[0]:
            die_with_parent(parent[0])
            if parent[0] == service:
                os.setpgid(0, 0)

    os.register_at_fork(before=before, after_in_child=in_child)  # for good: there is no way to take it back
    try:
        yield
    finally:
        armed[0] = False


def _unname_shared_memory(pids: Iterable[int]) -> None:
    """Unlinks the memory that the workers of a started engine share: it lives while they do, and no kill leaves it behind."""
    for pid in pids:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            for mapping in process.memory_maps():
                if mapping.path.startswith(_WORKERS_MEMORY):
                    Path(mapping.path).unlink(missing_ok=True)


def _openai_app(llm: Any, model_dir: Path, served_name: str, loop: asyncio.AbstractEventLoop) -> Any:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # in older releases
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser  # type: ignore[import-not-found, no-redef]

    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", str(model_dir), "--served-model-name", served_name])
    app = build_app(arguments, ("generate",), llm.model_config)
    making = asyncio.run_coroutine_threadsafe(init_app_state(llm, app.state, arguments, ("generate",)), loop)
    try:
        making.result(HTTP_SECONDS)
    finally:
        making.cancel()  # of what is done: nothing
    return app
