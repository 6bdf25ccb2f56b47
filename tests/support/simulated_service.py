"""A training service without torch: the real API, log, learner and sampler around simulated engines.

`python -m support.simulated_service PART NAME ROOT PORT` is one of its processes.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from redis.asyncio import Redis
from safetensors.numpy import load_file

from polyreme.experience.requests import RequestLog
from polyreme.experience.store import RECONNECT_TIMEOUT, connect
from polyreme.net.http_server import serve_http
from polyreme.net.ports import loopback
from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import ArenaSource, TensorSpec, plan_manifest, tensor_views
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


async def sample(log: RequestLog, stop: asyncio.Event) -> None:
    """Answers sampling requests until `stop`."""
    simulated = SimulatedInferenceEngine(frozenset({WEIGHT}), LONGEST, VOCAB, lengths=Lengths(mean=16))
    await simulated.open()
    with closing(SimulatedWeights()) as weights:
        given: Any = weights
        await ServedSampler(log, simulated, given, (1,), lambda ids: " ".join(map(str, ids))).run(stop)
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
