"""A simulated inference engine: no model and no compute, for tests and scale runs of everything around an engine.

Kept here: tokens are a function of (weights, seed, tokens so far), at temperature 0 of (weights, tokens so far) alone. So a sequence
continued from a prefix, on this engine or another with the same weights, can be checked token by token; so can a swap in mid-sequence.
Time and failures follow a profile and a schedule, and nothing is random.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

import xxhash

from polyreme.weights.arena import Arena, ArenaError
from polyreme_rollout.engine.base import ArenaSource, Delta, EngineDeadError, EngineRequest, Loaded, LoadError, Sampling

_U64 = (1 << 64) - 1


@dataclass(frozen=True)
class Profile:
    """How fast a simulated engine is, and how long its answers are.

    Args:
        step_seconds: of one token of one sequence, whatever else runs.
        delta_tokens: tokens handed over at a time.
        mean_tokens: of an answer; lengths are geometric, so the rest of an answer does not depend on its beginning.
        spread: standard deviation of the log of the mean over seeds; 0: the same for all; 1: a long tail.
        load_seconds: of a weight load.
        max_num_seqs: sequences at once; more wait.
    """

    step_seconds: float = 0.0
    delta_tokens: int = 16
    mean_tokens: float = 32.0
    spread: float = 0.0
    load_seconds: float = 0.0
    max_num_seqs: int = 256


@dataclass(frozen=True)
class Failures:
    """What goes wrong, and when. Tokens are counted over all sequences since the start.

    Args:
        die_after: tokens after which the engine is dead.
        silent_after: tokens after which nothing more comes.
        broken_loads: which loads fail, counted from 1.
    """

    die_after: float = math.inf
    silent_after: float = math.inf
    broken_loads: frozenset[int] = frozenset()


@dataclass
class _Running:
    """A sequence under way: `tokens` is prompt and what was sampled."""

    tokens: list[int]
    sampled: int = 0


@dataclass
class _State:
    tokens: int = 0
    loads: int = 0
    policy: int = 0
    running: dict[str, _Running] = field(default_factory=dict)


class SimulatedEngine:
    """An Engine (see `base`) on any set of weights.

    Args:
        weight_names: of the model it pretends to be.
        vocab_size, max_model_len: of that model.
    """

    name = "simulated"

    def __init__(
        self,
        weight_names: Sequence[str],
        vocab_size: int,
        max_model_len: int,
        profile: Profile | None = None,
        failures: Failures | None = None,
    ) -> None:
        self.weight_names = frozenset(weight_names)
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self._profile, self._failures = profile or Profile(), failures or Failures()
        self._state = _State()
        self._room = asyncio.Semaphore(self._profile.max_num_seqs)
        self._sampling = asyncio.Event()
        self._sampling.set()
        self._dead = asyncio.Event()

    @property
    def dead(self) -> bool:
        return self._dead.is_set()

    @property
    def policy(self) -> int:
        """A digest of the loaded weights."""
        return self._state.policy

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        running = _Running(list(request.prompt_ids))
        self._state.running[request.request_id] = running
        try:
            async with self._room:
                finish = None
                while finish is None:
                    count = min(self._profile.delta_tokens, request.max_new - running.sampled)
                    await self._pass_time(count)
                    delta = self._sample(request, running, count)
                    finish = delta.finish
                    yield delta
        finally:
            del self._state.running[request.request_id]

    async def pause(self) -> None:
        self._check_alive()
        self._sampling.clear()

    async def load(self, sources: Sequence[ArenaSource]) -> Loaded:
        self._check_alive()
        self._state.loads += 1
        if self._profile.load_seconds:
            await asyncio.sleep(self._profile.load_seconds)
        if self._state.loads in self._failures.broken_loads:
            raise LoadError(f"load {self._state.loads} fails by schedule")
        for source in sources:
            try:
                arena = Arena.open(source.path)
                try:
                    arena.check(source.slot, source.generation)
                finally:
                    arena.close()
            except ArenaError as error:
                raise LoadError(str(error)) from None
        digests = sorted((tensor.name, tensor.digest) for source in sources for tensor in source.manifest.tensors)
        self._state.policy = xxhash.xxh3_64_intdigest(repr(digests).encode())
        sampled = {name: running.sampled for name, running in self._state.running.items()}
        return Loaded(self._profile.load_seconds, sampled)

    async def resume(self) -> None:
        self._check_alive()
        self._sampling.set()

    def close(self) -> None:
        """Ends everything under way. Idempotent."""
        self._dead.set()

    def _sample(self, request: EngineRequest, running: _Running, count: int) -> Delta:
        ids, logprobs, stopped = simulate(
            self._state.policy, running.tokens, request.seed, request.sampling, count, self.vocab_size, self._profile
        )
        running.tokens += ids
        running.sampled += len(ids)
        self._state.tokens += len(ids)
        finish = "stop" if stopped else "length" if running.sampled == request.max_new else None
        return Delta(ids, logprobs, finish)

    async def _pass_time(self, tokens: int) -> None:
        """The time of `tokens` steps; longer while paused, for ever when silent. Raises EngineDeadError."""
        if self._state.tokens >= self._failures.die_after:
            self._dead.set()
        if self._state.tokens >= self._failures.silent_after:
            await self._dead.wait()
        self._check_alive()
        await asyncio.sleep(self._profile.step_seconds * tokens)
        await self._sampling.wait()
        self._check_alive()

    def _check_alive(self) -> None:
        if self.dead:
            raise EngineDeadError("the simulated engine is dead, by its schedule or because it was closed")


def simulate(
    policy: int, tokens: Sequence[int], seed: int, sampling: Sampling, count: int, vocab_size: int, profile: Profile
) -> tuple[list[int], list[float], bool]:
    """Up to `count` tokens that follow `tokens`, their log-probabilities, and whether the last one is a stop token. Pure."""
    greedy = sampling.temperature == 0
    state = _mix(policy if greedy else policy ^ _mix(seed))
    for token in tokens:
        state = _mix(state ^ token)
    mean = profile.mean_tokens
    if profile.spread and not greedy:
        mean *= math.exp(profile.spread * NormalDist().inv_cdf(_unit(_mix(seed ^ 0x5EED))))
    ids: list[int] = []
    logprobs: list[float] = []
    for _ in range(count):
        stops = bool(sampling.stop_token_ids) and _unit(_mix(state + 1)) * mean < 1
        token = sampling.stop_token_ids[0] if stops else _mix(state + 2) % vocab_size
        while not stops and token in sampling.stop_token_ids:
            token = (token + 1) % vocab_size
        ids.append(token)
        logprobs.append(-2.0 * _unit(_mix(state + 3)))
        if stops:
            return ids, logprobs, True
        state = _mix(state ^ token)
    return ids, logprobs, False


def _mix(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _U64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _U64
    return x ^ (x >> 31)


def _unit(x: int) -> float:
    """In (0, 1)."""
    return ((x >> 11) + 0.5) / (1 << 53)
