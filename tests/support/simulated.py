"""A run without models: simulated replicas behind the real rollout services, and a learner that does not train.

Redis, gRPC, leases, arenas, pushes, commits and the ledger are real.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from polyreme import API_VERSION
from polyreme.api.v1 import rollout_pb2, rollout_pb2_grpc
from polyreme.config.load import parse_config
from polyreme.config.run import RunConfig
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.record_codec import decode_group
from polyreme.experience.records import GroupRecord
from polyreme.experience.run import Run
from polyreme.net import rpc
from polyreme.weights.arena import Arena
from polyreme.weights.canary import Canary
from polyreme.weights.digest import seal
from polyreme.weights.manifest import TensorSpec, plan_manifest, tensor_views
from polyreme_rollout.generation.requests import RequestLimits
from polyreme_rollout.generation.running import RunningSequences
from polyreme_rollout.generation.service import Identity, RolloutService
from polyreme_rollout.metrics import ReplicaMetrics
from polyreme_rollout.testing.simulated_engine import SimulatedInferenceEngine
from polyreme_rollout.weights.weight_swap import WeightSwapper
from polyreme_rollout.weights.weights_service import WeightsService
from polyreme_trainer.weight_sync.replica_client import ReplicaClient
from polyreme_trainer.weight_sync.version import Version
from support.tiny_tokenizer import CHARS, SPECIAL, model_files

VOCAB = len(SPECIAL) + len(CHARS)
CONTEXT = 256
_LAYOUT = plan_manifest([TensorSpec("weight", "F32", (4,))])
_SERVICES = ["polyreme.api.v1.RolloutService", "polyreme.api.v1.WeightsService"]


def config_tree(folder: Path, rows: Sequence[dict[str, Any]], **sections: Any) -> RunConfig:
    """A small run on `rows`; `sections` replace keys, one level deep."""
    (folder / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    tree: dict[str, Any] = {
        "output_dir": str(folder),
        "iterations": 2,
        "groups_per_iteration": 4,
        "group_size": 3,
        "model": {"path": str(folder)},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 32},
        "rollout": {"max_new_tokens": 96, "max_model_len": 128, "start_timeout": 600.0, "chunk_timeout": 60.0},
        "reward": {"rewards": [{"name": "exact"}], "start_timeout": 600.0, "attempts": 2},
        "trainer": {"optimizer": {"lr": 1e-3}},
    }
    for key, value in sections.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_config(tree, "the test")


ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]


async def make_run(redis: Any, run_id: str, config: RunConfig, **files: Any) -> Run:
    return await Run.create(redis, run_id, config, model_files(**files))


class _Recorder(RolloutService):
    """Notes its calls of Generate, however they come."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.calls: list[rollout_pb2.GenerateRequest] = []
        self.asked = asyncio.Event()

    async def responses(
        self, request: rollout_pb2.GenerateRequest
    ) -> AsyncGenerator[tuple[rollout_pb2.GenerateResponse, bool], None]:
        self.calls.append(request)
        self.asked.set()
        async with aclosing(super().responses(request)) as responses:
            async for response in responses:
                yield response


@dataclass
class Replica:
    """A serving simulated replica. `calls` has its Generate requests, in order."""

    id: str
    engine: SimulatedInferenceEngine
    service: _Recorder
    running: RunningSequences
    swapper: WeightSwapper
    metrics: ReplicaMetrics
    lease: Lease
    _life: AsyncExitStack = field(default_factory=AsyncExitStack)
    _lease: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def calls(self) -> list[rollout_pb2.GenerateRequest]:
        return self.service.calls

    @property
    def asked(self) -> asyncio.Event:
        """Set by a call."""
        return self.service.asked

    async def lose_lease(self) -> None:
        """Removes its lease, as if it had stopped renewing. It still serves."""
        await self._lease.aclose()

    async def die(self) -> None:
        """Stops it, as if it were killed. Its lease outlives it."""
        await self._life.aclose()

    async def vanish(self) -> None:
        """Stops it and removes its lease, as if its machine had vanished."""
        await self.lose_lease()
        await self.die()


@asynccontextmanager
async def simulated_replica(
    run: Run,
    name: str,
    api: int = API_VERSION,
    engine_type: type[SimulatedInferenceEngine] = SimulatedInferenceEngine,
    may_use_devices: Callable[[], bool] = lambda: True,
    commit_seconds: float = 2.0,
    **engine_arguments: Any,
) -> AsyncIterator[Replica]:
    """Starts a replica with a lease. It serves nothing until a version is pushed to it."""
    engine = engine_type(frozenset(["weight"]), CONTEXT, VOCAB, **engine_arguments)
    metrics = ReplicaMetrics()
    running = RunningSequences(metrics)
    policy = running.change_policy, running.lose_policy
    swapper = WeightSwapper(run.run_id, engine, lambda: 0, *policy, may_use_devices, commit_seconds=commit_seconds)
    limits = RequestLimits(CONTEXT, VOCAB, 1 << 14)
    service = _Recorder(engine, Identity(run.run_id, name, ""), limits, metrics, swapper, running)
    async with AsyncExitStack() as life, AsyncExitStack() as lease_life:
        replica = Replica(
            name, engine, service, running, swapper, metrics, Lease("rollout", name, "", "", api), _life=life, _lease=lease_life
        )

        async def announce() -> None:
            pass

        def add(server: grpc.aio.Server) -> None:
            rollout_pb2_grpc.add_RolloutServiceServicer_to_server(service, server)
            WeightsService(swapper, metrics, announce).add_to(server)

        server = await life.enter_async_context(rpc.serve("127.0.0.1", 0, add, _SERVICES, grace=0.0))
        address = f"127.0.0.1:{server.port}"
        replica.lease = replace(replica.lease, address=address, http_address=address)
        await lease_life.enter_async_context(await Registry(run).register(replica.lease))
        yield replica
        engine.close()


class IdleLearner:
    """Acts as the learner without training: every version has random weights.

    Attributes:
        trained: the groups of every iteration.
    """

    def __init__(self, run: Run, arena: Arena) -> None:
        self.run, self.log, self._arena = run, ExperienceLog(run), arena
        self._rng = np.random.default_rng(0)
        self._manifest: Any = None
        self._generation = 0
        self.trained: dict[int, list[GroupRecord]] = {}

    async def write(self, version: int) -> None:
        """Makes the weights of a version."""
        assert self.log.term is not None
        self._arena.begin(version % 3)
        tensor_views(_LAYOUT, self._arena.slot_view(version % 3))["weight"][:] = self._rng.normal(size=4)
        self._generation = self._arena.complete(version % 3, version, self.log.term.counter)
        stamped = _LAYOUT.stamped(self.run.run_id, self.log.term.counter, version)
        self._manifest = seal(stamped, self._arena.slot_view(version % 3)).to_proto()

    async def stage(self, replica: Replica) -> None:
        """Sends the newest version to a replica and announces its commit."""
        async with self._link(replica) as link:
            await link.stage(self._version(None))
        await self.log.ack_stage(replica.id, self._manifest.id.version, self._manifest.id.term)

    async def push(self, replica: Replica, canary: Canary | None = None) -> None:
        """Pushes the newest version to a replica."""
        await self.stage(replica)
        async with self._link(replica) as link:
            await link.commit(self._version(canary))
        await self.log.ack_commit(replica.id, self._manifest.id.version, self._manifest.id.term, 0.0, 0.0)

    def _version(self, canary: Canary | None) -> Version:
        number = self._manifest.id.version
        return Version(self._manifest, number % 3, self._generation, canary.to_proto() if canary else None)

    @asynccontextmanager
    async def _link(self, replica: Replica) -> AsyncIterator[ReplicaClient]:
        link = ReplicaClient(replica.lease, self._arena)
        try:
            yield link
        finally:
            await link.close()

    async def train(self, iterations: Sequence[int], replicas: Sequence[Replica]) -> None:
        """Plans and "trains" each iteration, and pushes the new version."""
        for iteration in iterations:
            plan = await self.log.wait_plan(iteration, 600.0)
            if plan is None:
                return
            self.trained[iteration] = [decode_group(payload) for payload in await self.log.read(plan)]
            await self.write(iteration)
            await self.log.set_version(iteration)
            await asyncio.gather(*(self.push(replica) for replica in replicas))


@asynccontextmanager
async def idle_learner(run: Run, replicas: Sequence[Replica] = (), version: int = 0) -> AsyncIterator[IdleLearner]:
    """A learner that has begun at `version` and pushed it to the replicas."""
    arena = Arena.create(run.run_id, _LAYOUT.nbytes)
    try:
        learner = IdleLearner(run, arena)
        await learner.log.take(Writer.LEARNER)
        await learner.write(version)
        await learner.log.begin(version)
        for replica in replicas:
            await learner.push(replica)
        yield learner
    finally:
        arena.close()
        arena.unlink()
