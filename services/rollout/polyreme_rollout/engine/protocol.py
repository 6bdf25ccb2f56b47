"""The inference engine as the rollout service uses it: token ids in, token ids and log-probabilities out.

Invariant, for every engine: the tokens of a request arrive in order, each with the log-probability under the distribution it was
sampled from; nothing is sampled between `pause` or `load` and `resume`; `load` reports how many tokens each request had when its
policy changed; `sleep` loses no request. tests/contract/test_engine_conformance.py checks every engine.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from polyreme.config.run import RunConfig
from polyreme.weights.manifest import ArenaSource

if TYPE_CHECKING:
    from fastapi import FastAPI  # the check of a configuration imports this module

CHUNK_TOKENS = 16
"""Tokens per chunk, if the engine supports it. A chunk costs one wake-up, as a single token would."""


class EngineDeadError(RuntimeError):
    """The engine's processes have exited. The service cannot continue."""


class LoadError(RuntimeError):
    """The engine could not load the weights. Its model may hold any mixture of old and new tensors."""


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_p 1 and top_k -1 keep the whole distribution. A stop id ends a request as its last token."""

    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter in PEFT's format.

    Attributes:
        folder: its directory.
        name: of this version. Other files have another name, also in the same directory.
    """

    folder: Path
    name: str

    @classmethod
    def newest(cls, folder: Path) -> "ServedAdapter":
        """The version that is in a directory now. Raises OSError."""
        return cls(folder, f"{folder} {folder.stat().st_mtime_ns}")


@dataclass(frozen=True)
class EngineRequest:
    """One sequence to continue.

    Args:
        request_id: unique among running requests.
        prompt_ids: the tokens to continue: prompt and prefix.
        max_new: upper bound of tokens to sample.
        seed: seed of this request's sampler, 63 bits.
        salt: requests share cached prefixes only under the same salt.
        adapter: one that `ServesAdapters.load_adapter` has loaded.
    """

    request_id: str
    prompt_ids: Sequence[int]
    max_new: int
    seed: int
    salt: str
    sampling: Sampling
    adapter: ServedAdapter | None = None


class NewTokens(NamedTuple):
    """New tokens of a request. `finish`: None, "stop" (by a stop id) or "length". `routes`: the experts of the tokens, as in
    `experience.proto`; empty if the engine does not report them."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str | None
    routes: bytes = b""


@dataclass(frozen=True)
class LoadResult:
    """
    `stopped`: when sampling stopped, or was asked to stop if the engine cannot tell, as time.perf_counter() (one clock per host).
    `seconds`: of the slowest worker's load.
    `sampled`: tokens of each unfinished request at the change, by request id. One that never ran, or has ended, may be missing.
    """

    stopped: float
    seconds: float
    sampled: Mapping[str, int]


@dataclass(frozen=True)
class Slept:
    """`freed`: device bytes. `weights`, `cache`: whether they are kept; a running request without its cache is computed again."""

    freed: int
    weights: bool
    cache: bool


TopTokens = Sequence[tuple[int, float]]
"""Tokens and their log-probabilities at temperature 1, in nats, the most likely one first."""


class TensorDigest(NamedTuple):
    """Shape, and xxh3_64 of the bytes (minus zero counts as zero)."""

    shape: tuple[int, ...]
    digest: int


class InferenceEngine(Protocol):
    """A started engine. `open` completes it inside the event loop that serves it."""

    @property
    def name(self) -> str:
        """Name and release of the engine, for display."""

    @property
    def max_model_len(self) -> int:
        """Upper bound of the tokens of prompt, prefix and response."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def weight_names(self) -> frozenset[str]:
        """Hugging Face names of all tensors of the model, without aliases. Known after `open`."""

    @property
    def reports_routes(self) -> bool:
        """Whether `generate` reports the experts of every token."""

    @property
    def dead(self) -> bool:
        """Whether the engine's processes have exited."""

    async def open(self) -> None:
        """Connects the engine to the running event loop. Raises EngineDeadError."""

    def generate(self, request: EngineRequest) -> AsyncIterator[NewTokens]:
        """Samples one request. Closing the iterator aborts it. Raises EngineDeadError."""

    async def logprobs(self, ids: Sequence[int], salt: str) -> Sequence[float]:
        """The log-probability of each of ids[1:] given the tokens before it, at temperature 1, in nats.

        It waits for a few steps of the engine; if that is idle, also until the requests that arrive at the same time have
        arrived. It never waits for the end of another request, however many run and wait.

        Raises:
            EngineDeadError: the engine has died.
        """

    async def top_logprobs(self, ids: Sequence[int], count: int, salt: str) -> Sequence[TopTokens]:
        """For each of ids[1:], the `count` most likely tokens given the tokens before it. Otherwise as `logprobs`."""

    async def pause(self) -> None:
        """Stops sampling between two steps. Running requests are kept, new ones wait. Raises EngineDeadError."""

    async def load(self, sources: Sequence[ArenaSource]) -> LoadResult:
        """Stops sampling like `pause`, and loads all parts of a version. Raises LoadError, EngineDeadError."""

    async def resume(self) -> None:
        """Continues sampling. After `sleep` and `wake`, takes the cache's memory back first. Raises EngineDeadError."""

    async def sleep(self) -> Slept:
        """Leaves the device to others, while paused. Running requests are kept. Raises EngineDeadError."""

    async def wake(self) -> None:
        """Takes back the memory of the weights, which `load` may then replace. Sampling stays paused. Raises EngineDeadError."""

    async def openai_app(self, served_name: str, salt: Callable[[], Awaitable[str]]) -> "FastAPI":
        """An application that serves the OpenAI-compatible /v1 on this engine.

        Args:
            served_name: the model name in requests and replies.
            salt: awaited for each request; see `EngineRequest.salt`. A client's own `cache_salt` is appended.
        """

    async def weight_digests(self) -> Sequence[Mapping[str, TensorDigest]]:
        """Digests of the weights that each worker uses, by the engine's tensor names, one mapping per worker. Raises LoadError,
        EngineDeadError."""

    def close(self) -> None:
        """Ends the engine's processes. Idempotent."""


@runtime_checkable
class ServesAdapters(Protocol):
    """An `InferenceEngine` whose requests may each have an adapter of their own on the loaded weights.

    Attributes:
        max_loras: the number of adapters that running requests may name, so that each runs at once and keeps its adapter; 0: the
            engine was started without adapters.
        max_lora_rank: of an adapter.
    """

    max_loras: int
    max_lora_rank: int

    async def load_adapter(self, adapter: ServedAdapter) -> None:
        """Loads an adapter, unless it is loaded. The directory's files are read again if it was evicted, here or with a later
        request. Raises LoadError, EngineDeadError."""

    async def logprobs(self, ids: Sequence[int], salt: str, adapter: ServedAdapter | None = None) -> Sequence[float]:
        """As `InferenceEngine.logprobs`, with an adapter."""

    async def top_logprobs(
        self, ids: Sequence[int], count: int, salt: str, adapter: ServedAdapter | None = None
    ) -> Sequence[TopTokens]:
        """As `InferenceEngine.top_logprobs`, with an adapter."""


class EngineFactory(Protocol):
    """Starts an engine. The process calls it in the main thread, before other threads and event loops, since engines may fork."""

    def __call__(self, config: RunConfig, model_dir: Path, random_weights: bool = True) -> InferenceEngine:
        """
        Args:
            config: the run's configuration, of which `device`, `model.dtype`, `rollout` and `data.date` are used.
            model_dir: a directory with the model's config and tokenizer files.
            random_weights: start with arbitrary weights, which a later `load` replaces, instead of those in `model_dir`.
        """
