"""A simulated inference engine: no model and no compute, for tests and scale runs of everything around an engine, without torch.

Kept here: tokens are a function of (weights, seed, tokens so far), at temperature 0 of (weights, tokens so far) alone. So a sequence
that is continued from a prefix, on this engine or another with the same weights, can be checked token by token, and so can a swap
in mid-sequence. Time and failures follow a schedule; nothing is random. It passes the same contract tests as vLLM.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import xxhash

from polyreme.weights.arena import ArenaError
from polyreme_rollout.arena_cache import ArenaCache
from polyreme_rollout.engine.base import ArenaSource, Delta, EngineDeadError, EngineRequest, Loaded, LoadError, Sampling
from polyreme_rollout.sequences import CHUNK_TOKENS

_U64 = (1 << 64) - 1


@dataclass(frozen=True)
class Lengths:
    """When the end token comes: geometrically, so that what is left of an answer does not depend on where it was cut.

    Args:
        mean: tokens up to it, at temperature 0 and for the median seed.
        spread: standard deviation over seeds of the mean's logarithm; 0: the same for all; 1: a long tail.
        end_id: the end token. It ends an answer where it is a stop id, as with any model.
    """

    mean: float = 32.0
    spread: float = 0.0
    end_id: int = 1


@dataclass(frozen=True)
class Failures:
    """What goes wrong, and when. Tokens are counted over all requests since the start.

    Args:
        die_after: tokens after which the engine is dead.
        silent_after: tokens after which nothing more comes.
        broken_loads: which loads fail, counted from 1.
    """

    die_after: float = math.inf
    silent_after: float = math.inf
    broken_loads: frozenset[int] = frozenset()


class SimulatedEngine:
    """See `engine.base.Engine`.

    Args:
        weight_names: Hugging Face names that a version must have.
        max_model_len, vocab_size: of the model that it stands for.
        step_seconds: the time of one token of every request under way.
        max_num_seqs: requests under way at once; more wait.

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
    ) -> None:
        self.weight_names, self.max_model_len, self.vocab_size = weight_names, max_model_len, vocab_size
        self.lengths = lengths or Lengths()
        self._step_seconds, self._failures = step_seconds, failures or Failures()
        self._arenas = ArenaCache()
        self._room = asyncio.Semaphore(max_num_seqs)
        self._running, self._dead = asyncio.Event(), asyncio.Event()
        self._running.set()
        self._sampled: dict[str, int] = {}
        self.tokens = self._loads = 0
        self.policy = 0
        """A digest of the loaded weights: what `sample` takes."""

    @property
    def dead(self) -> bool:
        return self._dead.is_set()

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
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
                    yield Delta(ids, logprobs, finish)
        finally:
            del self._sampled[request.request_id]

    async def pause(self) -> None:
        self._check_alive()
        self._running.clear()

    async def load(self, sources: Sequence[ArenaSource]) -> Loaded:
        self._check_alive()
        started, policy = time.perf_counter(), xxhash.xxh3_64()
        self._loads += 1
        if self._loads in self._failures.broken_loads:
            raise LoadError(f"load {self._loads} fails by schedule")
        try:
            for source in sources:
                arena = self._arenas.named(source.path, source.nonce)
                arena.check(source.slot, source.generation)
                policy.update(arena.slot_view(source.slot)[: source.manifest.nbytes])
                arena.check(source.slot, source.generation)
        except ArenaError as error:
            raise LoadError(str(error)) from None
        self.policy = policy.intdigest()
        return Loaded(time.perf_counter() - started, dict(self._sampled))

    async def resume(self) -> None:
        self._check_alive()
        self._running.set()

    def close(self) -> None:
        self._dead.set()
        self._arenas.close()

    async def _spend(self, tokens: int) -> None:
        """The time of `tokens` steps and of any pause. Raises EngineDeadError."""
        if self.tokens >= self._failures.die_after:
            self._dead.set()
        if self.tokens >= self._failures.silent_after:
            await self._dead.wait()
        await asyncio.sleep(self._step_seconds * tokens)
        await self._running.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.dead:
            raise EngineDeadError("the simulated engine is dead: it was closed, or its schedule says so")


def sample(
    policy: int, tokens: Sequence[int], seed: int, sampling: Sampling, count: int, vocab_size: int, lengths: Lengths
) -> tuple[list[int], list[float]]:
    """Up to `count` tokens behind `tokens`, ending with the first stop token, and their log-probabilities. Pure."""
    chance = _end_chance(seed, sampling, lengths)
    return _continue(_state(policy, tokens, seed, sampling), chance, sampling, count, vocab_size, lengths.end_id)[:2]


def _end_chance(seed: int, sampling: Sampling, lengths: Lengths) -> int:
    """Of each token to be the end token, in units of 2^-64."""
    mean = lengths.mean
    if lengths.spread and sampling.temperature:
        mean *= math.exp(lengths.spread * NormalDist().inv_cdf(_unit(_mix(seed ^ 1))))
    return int(2.0**64 / max(1.0, mean))


def _state(policy: int, tokens: Sequence[int], seed: int, sampling: Sampling) -> int:
    """What decides all further tokens, 64 bits."""
    state = _mix(policy ^ _mix(seed) if sampling.temperature else policy)
    for token in tokens:
        state = _mix(state ^ token)
    return state


def _continue(
    state: int, chance: int, sampling: Sampling, count: int, vocab_size: int, end_id: int
) -> tuple[list[int], list[float], int]:
    """As `sample`; and the state behind its tokens. This is where a simulated replica spends its processor time."""
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
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
    return x ^ (x >> 31)


def _unit(x: int) -> float:
    """In (0, 1)."""
    return ((x >> 11) + 0.5) / (1 << 53)
