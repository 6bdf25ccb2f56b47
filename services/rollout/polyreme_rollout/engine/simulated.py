"""An engine without a model: the service's own behaviour, and many replicas on one machine, without torch.

Kept here: what it samples is a function of the weights' bytes, the prompt, the position, and for temperature > 0 the seed; so a
new policy, and only that, changes greedy answers. It passes the same contract tests as vLLM.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence

import xxhash

from polyreme.weights.arena import ArenaError
from polyreme_rollout.arenas import ArenaCache
from polyreme_rollout.engine.base import ArenaSource, Delta, EngineRequest, Loaded, LoadError
from polyreme_rollout.slots import CHUNK_TOKENS


class SimulatedEngine:
    """See `engine.base.Engine`.

    Args:
        weight_names: Hugging Face names that a version must have.
        max_model_len, vocab_size: of the model that it stands for.
        step_seconds: the time of one token of every request under way.
    """

    name = "simulated"

    def __init__(self, weight_names: frozenset[str], max_model_len: int, vocab_size: int, step_seconds: float = 0.0) -> None:
        self.weight_names, self.max_model_len, self.vocab_size = weight_names, max_model_len, vocab_size
        self._step_seconds = step_seconds
        self._arenas = ArenaCache()
        self._policy = 0
        self._running = asyncio.Event()
        self._running.set()
        self._sampled: dict[str, int] = {}
        self.dead = False

    async def generate(self, request: EngineRequest) -> AsyncIterator[Delta]:
        ids: list[int] = []
        logprobs: list[float] = []
        self._sampled[request.request_id] = 0
        try:
            for position in range(request.max_new):
                await asyncio.sleep(self._step_seconds)
                await self._running.wait()
                token = self._draw(request, position)
                self._sampled[request.request_id] = position + 1
                ids.append(token)
                logprobs.append(-math.log(self.vocab_size) if request.sampling.temperature else 0.0)
                stopped = token in request.sampling.stop_token_ids
                if stopped or position + 1 == request.max_new:
                    yield Delta(ids, logprobs, "stop" if stopped else "length")
                    return
                if len(ids) == CHUNK_TOKENS:
                    yield Delta(ids, logprobs, None)
                    ids, logprobs = [], []
        finally:
            del self._sampled[request.request_id]

    async def pause(self) -> None:
        self._running.clear()

    async def load(self, sources: Sequence[ArenaSource]) -> Loaded:
        started, policy = time.perf_counter(), xxhash.xxh3_64()
        try:
            for source in sources:
                arena = self._arenas.named(source.path, source.nonce)
                arena.check(source.slot, source.generation)
                policy.update(arena.slot_view(source.slot)[: source.manifest.nbytes])
                arena.check(source.slot, source.generation)
        except ArenaError as error:
            raise LoadError(str(error)) from None
        self._policy = policy.intdigest()
        return Loaded(time.perf_counter() - started, dict(self._sampled))

    async def resume(self) -> None:
        self._running.set()

    def close(self) -> None:
        self._arenas.close()

    def _draw(self, request: EngineRequest, position: int) -> int:
        seed = request.seed if request.sampling.temperature else 0
        place = len(request.prompt_ids) + position
        return xxhash.xxh3_64_intdigest(f"{self._policy} {seed} {list(request.prompt_ids[:4])} {place}") % self.vocab_size
