"""A training service without torch: the real API, log, learner and sampler around simulated engines.

`python -m support.simulated_service PART NAME ROOT PORT` is one of its processes.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash
from redis.asyncio import Redis
from safetensors.numpy import load_file

from polyreme.experience.requests import RequestLog
from polyreme.experience.store import RECONNECT_TIMEOUT, connect
from polyreme.net.http_server import serve_http
from polyreme.net.ports import loopback
from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import ArenaSource, TensorSpec, plan_manifest, tensor_views
from polyreme_rollout.engine.protocol import EngineRequest, NewTokens, ServedAdapter, TopTokens
from polyreme_rollout.local.requests import ServedSampler
from polyreme_rollout.testing.simulated_engine import Lengths, SimulatedInferenceEngine
from polyreme_trainer.service.accounts import Accounts
from polyreme_trainer.service.api import ServiceApi
from polyreme_trainer.service.folders import Folders
from polyreme_trainer.service.learner import ModelLearner
from polyreme_trainer.service.states import States
from polyreme_trainer.testing.simulated_tenants import WEIGHT, SimulatedTenantEngine

VOCAB, LONGEST, BASE, SIGNING_KEY, MODELS = 64, 256, "base", "key", "models"
_PLAN = plan_manifest([TensorSpec(WEIGHT, "U8", (32,))])


class SimulatedWeights:
    """What `SavedWeights` does, for the files of a simulated model."""

    def __init__(self) -> None:
        self._arena, self._version = Arena.private(_PLAN.nbytes), 0

    def write(self, folder: Path | None) -> ArenaSource:
        self._version += 1
        if folder is not None and (config := folder / "adapter_config.json").exists():
            json.loads(config.read_text())
        self._arena.begin(0)
        view = self._arena.slot_view(0)
        tensor_views(_PLAN, view)[WEIGHT][:] = 0 if folder is None else load_file(folder / "model.safetensors")[WEIGHT]
        sealed = seal(_PLAN.stamped("saved", 0, self._version), view)
        return ArenaSource(str(self._arena.path), self._arena.nonce, 0, self._arena.complete(0, self._version, 0), sealed)

    def close(self) -> None:
        self._arena.close()


def engine() -> SimulatedTenantEngine:
    return SimulatedTenantEngine(VOCAB, LONGEST)


def learner(log: RequestLog, root: Path, limit: int = 1 << 30) -> ModelLearner:
    return ModelLearner(log, engine(), States(root, limit), BASE, 32)


def api(log: RequestLog, root: Path, accounts: Accounts | None = None) -> ServiceApi:
    return ServiceApi(log, Folders(root), BASE, str(root), "simulated", LONGEST, SIGNING_KEY, accounts)


class AdapterEngine(SimulatedInferenceEngine):
    """A simulated engine whose requests may each have an adapter, of which it keeps the newest ones in memory.

    Attributes:
        loads: how often it was asked to load an adapter.
        read: the names of the adapters in the order in which it has read their files.
        most: the largest number of adapters that ran at once.
        running: the number of running answers of each adapter.
    """

    max_loras, max_lora_rank = 2, 8

    def __init__(self) -> None:
        super().__init__(frozenset({WEIGHT}), LONGEST, VOCAB, lengths=Lengths(mean=16))
        self.loads, self.read, self.most = 0, list[str](), 0
        self.running, self._kept = Counter[str](), dict[str, int]()

    async def load_adapter(self, adapter: ServedAdapter) -> None:
        self.loads += 1
        self._hold(adapter)

    def _hold(self, adapter: ServedAdapter) -> None:
        if adapter.name not in self._kept:
            self.read.append(adapter.name)
            content = (adapter.folder / "adapter_model.safetensors").read_bytes()
            self._kept[adapter.name] = xxhash.xxh3_64_intdigest(content)
        self._kept[adapter.name] = self._kept.pop(adapter.name)
        if len(self._kept) > self.max_loras:
            del self._kept[next(iter(self._kept))]

    async def generate(self, request: EngineRequest) -> AsyncIterator[NewTokens]:
        if request.adapter is None:
            async for new in super().generate(request):
                yield new
            return
        self._hold(request.adapter)
        name, seed = request.adapter.name, request.seed ^ self._kept[request.adapter.name]
        self.running[name] += 1
        self.most = max(self.most, len(+self.running))
        try:
            async for new in super().generate(replace(request, seed=seed)):
                yield new
        finally:
            self.running[name] -= 1

    async def logprobs(self, ids: Sequence[int], salt: str, adapter: ServedAdapter | None = None) -> Sequence[float]:
        return await super().logprobs(ids, salt)

    async def top_logprobs(
        self, ids: Sequence[int], count: int, salt: str, adapter: ServedAdapter | None = None
    ) -> Sequence[TopTokens]:
        return await super().top_logprobs(ids, count, salt)


async def sample(log: RequestLog, stop: asyncio.Event, given: SimulatedInferenceEngine | None = None) -> None:
    """Answers sampling requests until `stop`."""
    simulated = given or SimulatedInferenceEngine(frozenset({WEIGHT}), LONGEST, VOCAB, lengths=Lengths(mean=16))
    await simulated.open()
    with closing(SimulatedWeights()) as weights:
        await simulated.load([weights.write(None)])  # the base model's, as a real engine has them from its start
        await simulated.resume()
        written: Any = weights
        await ServedSampler(log, simulated, written, (1,), lambda ids: " ".join(map(str, ids))).run(stop)
    simulated.close()


@asynccontextmanager
async def simulated_service(
    redis: Redis, name: str, root: Path, limit: int = 1 << 30, accounts: Accounts | None = None
) -> AsyncIterator[str]:
    """Serves until the block ends. Yields the API's address."""
    log, stop = RequestLog(redis, name), asyncio.Event()
    async with log.following(), serve_http(loopback(), 0, api(log, root, accounts).app(), drain_timeout=1.0) as port:
        working = [asyncio.create_task(learner(log, root, limit).run(stop)), asyncio.create_task(sample(log, stop))]
        try:
            yield f"http://{loopback()}:{port}"
        finally:
            stop.set()
            await asyncio.gather(*working)


async def _run(part: str, url: str, name: str, root: Path, port: int) -> None:
    """A process of the service, until it is killed."""
    redis, forever = await connect(url, RECONNECT_TIMEOUT), asyncio.Event()
    log = RequestLog(redis, name)
    async with log.following():
        if part == "api":
            async with serve_http(loopback(), port, api(log, root).app(), drain_timeout=1.0):
                await forever.wait()
        elif part == "learner":
            await learner(log, root).run(forever)
        else:
            await sample(log, forever)


if __name__ == "__main__":
    asyncio.run(_run(sys.argv[1], os.environ["SERVICE_REDIS"], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
