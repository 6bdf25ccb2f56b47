"""A simulated inference engine without a model, for tests and scale runs of everything around it. It does not import torch.

Invariant: tokens are a function of (weights, seed, previous tokens), at temperature 0 of (weights, previous tokens) alone. A
sequence that continues from a prefix, here or on another engine with the same weights, can therefore be checked token by token,
and so can a swap within a sequence. Time and failures follow a schedule; nothing is random.
"""

import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import xxhash
from fastapi import FastAPI

from polyreme.config.run import RunConfig
from polyreme.dataset.chat import Chat
from polyreme.weights.arena import ArenaError
from polyreme.weights.manifest import ArenaSource
from polyreme_rollout.engine.arena_cache import ArenaCache
from polyreme_rollout.engine.protocol import (
    CHUNK_TOKENS,
    EngineDeadError,
    EngineRequest,
    LoadError,
    LoadResult,
    NewTokens,
    Sampling,
    Slept,
    TensorDigest,
    TopTokens,
)

WEIGHT_NAMES = frozenset({"weight"})
"""The tensors of the simulated learner's versions."""

_U64 = (1 << 64) - 1


@dataclass(frozen=True)
class Lengths:
    """The distribution of the end token. It is geometric, so the rest of an answer does not depend on the point where it was cut.

    Args:
        mean: tokens up to the end token, at temperature 0 and for the median seed.
        spread: standard deviation over seeds of the mean's logarithm; 0: none; 1: a long tail.
        end_id: the end token. It ends an answer only if it is a stop id, as with any model.
    """

    mean: float = 32.0
    spread: float = 0.0
    end_id: int = 1


@dataclass(frozen=True)
class Failures:
    """A schedule of failures. Tokens are counted over all requests since the start.

    Args:
        die_after: number of tokens after which the engine is dead.
        silent_after: number of tokens after which no further token arrives.
        broken_loads: the loads that fail, counted from 1.
    """

    die_after: float = math.inf
    silent_after: float = math.inf
    broken_loads: frozenset[int] = frozenset()


def start(config: RunConfig, model_dir: Path, random_weights: bool = True) -> "SimulatedInferenceEngine":
    """An `EngineFactory`: context, vocabulary and end token are the run's."""
    files = {path.name: path.read_bytes() for path in model_dir.iterdir() if path.is_file()}
    return for_run(config, files, Lengths(end_id=end_id(files)))


def for_run(
    config: RunConfig, model_files: Mapping[str, bytes], lengths: "Lengths", step_seconds: float = 0.0
) -> "SimulatedInferenceEngine":
    """An engine with the run's context, vocabulary and concurrency."""
    vocab_size = json.loads(model_files["config.json"])["vocab_size"]
    rollout = config.rollout
    return SimulatedInferenceEngine(WEIGHT_NAMES, rollout.max_model_len, vocab_size, step_seconds, rollout.max_num_seqs, lengths)


def end_id(model_files: Mapping[str, bytes]) -> int:
    """The token that ends answers, from the model's files; 1 when they name none."""
    for name in ("generation_config.json", "config.json"):
        stop = json.loads(model_files.get(name, b"{}")).get("eos_token_id")
        if stop is not None:
            return int(stop[0] if isinstance(stop, list) else stop)
    return Lengths.end_id


class SimulatedInferenceEngine:
    """A simulated `InferenceEngine`.

    Args:
        weight_names: Hugging Face names that a version must have.
        max_model_len, vocab_size: of the simulated model.
        step_seconds: duration of one token of every running request; may be changed at any time.
        max_num_seqs: requests that run at once; others wait.
        route_bytes: bytes of routes that it reports per token, see `routes_of`; 0: it reports none.

    Attributes:
        tokens: sampled since the start.
    """

    name = "simulated"

    def __init__(
        self,
        weight_names: frozenset[str],
        max_model_len: int,
        vocab_size: int,
        step_seconds: float = 0.0,
        max_num_seqs: int = 256,
        lengths: Lengths | None = None,
        failures: Failures | None = None,
        route_bytes: int = 0,
    ) -> None:
        self.weight_names, self.max_model_len, self.vocab_size = weight_names, max_model_len, vocab_size
        self.lengths = lengths or Lengths()
        self.route_bytes, self.reports_routes = route_bytes, route_bytes > 0
        self.step_seconds, self._failures = step_seconds, failures or Failures()
        self._arenas = ArenaCache()
        self._room = asyncio.Semaphore(max_num_seqs)
        self._running, self._dead = asyncio.Event(), asyncio.Event()
        self._running.set()
        self._sampled: dict[str, int] = {}
        self.tokens = self._loads = 0
        self.policy = 0
        """A digest of the loaded weights, as an argument of `sample`."""
        self._digests: dict[str, TensorDigest] = {}

    @property
    def dead(self) -> bool:
        return self._dead.is_set()

    async def open(self) -> None:
        self._check_alive()

    async def generate(self, request: EngineRequest) -> AsyncIterator[NewTokens]:
        tokens = list(request.prompt_ids)
        self._sampled[request.request_id] = done = 0
        finish: str | None = None
        policy: int | None = None
        state, chance = 0, _end_chance(request.seed, request.sampling, self.lengths)
        try:
            async with self._room:
                while finish is None:
                    count = min(CHUNK_TOKENS, request.max_new - done)
                    await self._spend(count)
                    if policy != self.policy:
                        policy = self.policy
                        state = _state(policy, tokens, request.seed, request.sampling)
                    ids, logprobs, state = _continue(state, chance, request.sampling, count, self.vocab_size, self.lengths.end_id)
                    tokens += ids
                    done += len(ids)
                    self.tokens += len(ids)
                    self._sampled[request.request_id] = done
                    stopped = ids[-1] in request.sampling.stop_token_ids
                    finish = "stop" if stopped else "length" if done == request.max_new else None
                    yield NewTokens(ids, logprobs, finish, routes_of(ids, self.route_bytes))
        finally:
            del self._sampled[request.request_id]

    async def logprobs(self, ids: Sequence[int], salt: str) -> Sequence[float]:
        """Each value is a function of the weights and of all tokens up to it."""
        await self._spend(1)
        states = itertools.accumulate(ids, lambda state, token: _mix(state ^ token), initial=_mix(self.policy))
        return [-2.0 / (1 << 32) * (state & 0xFFFFFFFF) for state in list(states)[2:]]

    async def top_logprobs(self, ids: Sequence[int], count: int, salt: str) -> Sequence[TopTokens]:
        """Each prompt's token and those after it by number, each less likely by 1."""
        values = await self.logprobs(ids, salt)
        return [
            [((token + place) % self.vocab_size, value - place) for place in range(count)]
            for token, value in zip(ids[1:], values, strict=True)
        ]

    async def pause(self) -> None:
        self._check_alive()
        self._running.clear()

    async def load(self, sources: Sequence[ArenaSource]) -> LoadResult:
        await self.pause()
        started, policy, digests = time.perf_counter(), xxhash.xxh3_64(), dict[str, TensorDigest]()
        self._loads += 1
        if self._loads in self._failures.broken_loads:
            raise LoadError(f"load {self._loads} fails by schedule")
        try:
            for source in sources:
                arena = self._arenas.with_nonce(source.path, source.nonce)
                arena.check(source.slot, source.generation)
                data = arena.slot_view(source.slot)
                policy.update(data[: source.manifest.nbytes])
                for tensor in source.manifest.tensors:
                    if not tensor.alias_of:
                        content = data[tensor.offset : tensor.offset + tensor.nbytes]
                        digests[tensor.name] = TensorDigest(tensor.shape, xxhash.xxh3_64_intdigest(content))
                arena.check(source.slot, source.generation)
        except ArenaError as error:
            raise LoadError(str(error)) from None
        self.policy = policy.intdigest()
        self._digests = digests
        return LoadResult(started, time.perf_counter() - started, dict(self._sampled))

    async def resume(self) -> None:
        self._check_alive()
        self._running.set()

    async def sleep(self) -> Slept:
        self._check_alive()
        return Slept(0, weights=True, cache=True)

    async def wake(self) -> None:
        self._check_alive()

    async def openai_app(self, served_name: str, salt: Callable[[], Awaitable[str]]) -> FastAPI:
        from polyreme_rollout.engine.plain_openai import make_openai_app

        return make_openai_app(self, served_name, salt, DecimalCodec())

    async def weight_digests(self) -> Sequence[Mapping[str, TensorDigest]]:
        self._check_alive()
        return [self._digests]

    def close(self) -> None:
        self._dead.set()
        self._arenas.close()

    async def _spend(self, tokens: int) -> None:
        """Sleeps for the time of `tokens` steps and of any pause. Raises EngineDeadError."""
        if self.tokens >= self._failures.die_after:
            self._dead.set()
        if self.tokens >= self._failures.silent_after:
            await self._dead.wait()
        await asyncio.sleep(self.step_seconds * tokens)
        await self._running.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.dead:
            raise EngineDeadError("the simulated engine is dead: it was closed, or its schedule ended it")


def sample(
    policy: int, tokens: Sequence[int], seed: int, sampling: Sampling, count: int, vocab_size: int, lengths: Lengths
) -> tuple[list[int], list[float]]:
    """Up to `count` tokens after `tokens`, ending with the first stop token, and their log-probabilities. Pure."""
    chance = _end_chance(seed, sampling, lengths)
    return _continue(_state(policy, tokens, seed, sampling), chance, sampling, count, vocab_size, lengths.end_id)[:2]


def routes_of(ids: Sequence[int], route_bytes: int) -> bytes:
    """The simulated routes of tokens: byte j of token t is (t + j) mod 256. Pure."""
    return bytes((token + byte) % 256 for token in ids for byte in range(route_bytes))


def _end_chance(seed: int, sampling: Sampling, lengths: Lengths) -> int:
    """The probability that a token is the end token, in units of 2^-64."""
    mean = lengths.mean
    if lengths.spread and sampling.temperature:
        mean *= math.exp(lengths.spread * NormalDist().inv_cdf(_unit(_mix(seed ^ 1))))
    return int(2.0**64 / max(1.0, mean))


def _state(policy: int, tokens: Sequence[int], seed: int, sampling: Sampling) -> int:
    """The 64-bit state that determines all further tokens."""
    state = _mix(policy ^ _mix(seed) if sampling.temperature else policy)
    for token in tokens:
        state = _mix(state ^ token)
    return state


def _continue(
    state: int, chance: int, sampling: Sampling, count: int, vocab_size: int, end_id: int
) -> tuple[list[int], list[float], int]:
    """As `sample`, with the state after its tokens. A simulated replica spends its processor time here."""
    stops, scale = sampling.stop_token_ids, -2.0 / (1 << 32) if sampling.temperature else 0.0
    ids: list[int] = []
    logprobs: list[float] = []
    for _ in range(count):
        low = state & 0xFFFFFFFF
        token = end_id if state < chance else (end_id + 1 + low % (vocab_size - 1)) % vocab_size
        ids.append(token)
        logprobs.append(scale * low)
        state = _mix(state ^ token)
        if token in stops:
            break
    return ids, logprobs, state


def _mix(x: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
    return x ^ (x >> 31)


def _unit(x: int) -> float:
    """In (0, 1)."""
    return ((x >> 11) + 0.5) / (1 << 53)


class DecimalCodec:
    """A `plain_openai.Codec`: token ids in decimal. No token ends an answer."""

    stop_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def chat(self, chat: Chat) -> list[int]:
        return [id for message in chat.messages for id in self.encode(str(message["content"]))]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))
