"""Swaps of a real replica: their pause, the time they add to batches of samples, and the start of a second replica.

Invariant: every swapped version was pushed as by a run's learner.
"""

import asyncio
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import torch
from safetensors.torch import load_file

from polyreme.api.v1 import rollout_pb2 as pb
from polyreme.api.v1 import rollout_pb2_grpc as pb_grpc
from polyreme.config.load import load_config
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.leases import Registry
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.net import rpc
from polyreme.process.lifecycle import Child
from polyreme.rundir.input_files import read_model_files
from polyreme.weights.arena import Arena
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest, tensor_views
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.weight_sync.publisher import Publisher
from polyreme_trainer.weight_sync.replica_state import Commit

TASK = Path(__file__).parents[2] / "examples" / "running_total"
SWAPS = 40
CALLS, SLOTS, NEW_TOKENS = 16, 8, 100
BATCH_ROUNDS = 5
SWAP_INTERVAL_SECONDS = 0.25
JOIN_SECONDS = 120.0


@dataclass
class Stage:
    """A replica, and a publisher that pushes versions of the demo's model to it."""

    run: Run
    redis_url: str
    address: str
    arena: Arena
    plan: Manifest
    term: int
    publisher: Publisher
    weights: dict[str, torch.Tensor]
    version: int = -1

    async def push(self) -> tuple[Commit, float]:
        """Writes the next version and waits until it is served. Returns the commit and the seconds since the version was complete."""
        self.version += 1
        slot = await self.publisher.acquire_slot(10)
        self.arena.begin(slot)
        for name, view in tensor_views(self.plan, self.arena.slot_view(slot)).items():
            torch.from_numpy(view).copy_(self.weights[name] * (1 + self.version * 1e-3))
        generation = self.arena.complete(slot, self.version, self.term)
        started = time.perf_counter()
        self.publisher.publish(self.plan.stamped(self.run.run_id, self.term, self.version), slot, generation)
        [commit] = await self.publisher.wait_committed(self.version, 1, 120)
        return commit, time.perf_counter() - started

    async def generate(self) -> None:
        """Generates one batch: CALLS x SLOTS samples of NEW_TOKENS tokens each."""
        prompt = torch.arange(4, 24, dtype=torch.int32).numpy().tobytes()
        sampling = pb.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1)

        async def call(stub: pb_grpc.RolloutServiceStub, number: int) -> None:
            slots = [pb.Slot(index=i, max_new=NEW_TOKENS, seed=number * SLOTS + i) for i in range(SLOTS)]
            request = pb.GenerateRequest(
                run_id=self.run.run_id, request_id=uuid.uuid4().hex, prompt_ids=prompt, slots=slots, sampling=sampling
            )
            ends = 0
            async for message in stub.Generate(request, timeout=120):
                ends += len(message.ends)
            if ends != SLOTS:
                raise SystemExit(f"{ends} of {SLOTS} samples ended")

        async with rpc.connect(self.address) as channel:
            stub = pb_grpc.RolloutServiceStub(channel)
            await asyncio.gather(*(call(stub, number) for number in range(CALLS)))


@asynccontextmanager
async def staged(folder: Path) -> AsyncIterator[Stage]:
    """Sets up the demo's model from its seed, a Redis, a replica that serves version 0, and the publisher."""
    sys.path.insert(0, str(TASK))
    import prepare  # type: ignore[import-not-found]  # the example's, found at run time

    prepare.save_tokenizer(folder / "model")
    prepare.save_model(folder / "model", seed=0)
    weights = load_file(folder / "model" / "model.safetensors")
    arch = load_architecture(folder / "model")
    specs = [TensorSpec(name, "F32", shape) for name, shape in hf_mapping.hf_shapes(arch).items()]
    plan = plan_manifest(specs, hf_mapping.hf_aliases(arch))
    weights |= {alias: weights[name] for alias, name in hf_mapping.hf_aliases(arch).items()}
    config = load_config(TASK / "run.yaml", [f"model.path={folder / 'model'}"])
    with EmbeddedServer.start(folder / "redis") as server:
        redis = await connect(server.url)
        run = await Run.create(redis, f"bench-{uuid.uuid4().hex[:8]}", config, read_model_files(config.model.path))
        term = await ExperienceLog(run).take(Writer.LEARNER)
        command = [sys.executable, "-m", "polyreme", "rollout", "--redis", server.url, "--run", run.run_id]
        replica = Child.spawn("rollout", command, log_path=folder / "rollout.log")
        arena = Arena.create(run.run_id, plan.nbytes)
        publisher = Publisher(server.url, run.run_id, term, arena)
        try:
            [lease] = await Registry(run).wait_for("rollout", 1, 120, alive=lambda: replica.poll() is None)
            publisher.start()
            yield Stage(run, server.url, lease.address, arena, plan, term.counter, publisher, weights)
        except BaseException:
            print(replica.log_tail(), file=sys.stderr)
            raise
        finally:
            publisher.close()
            await replica.stop(grace=20)
            arena.close()
            await redis.aclose()


async def bench_swap() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        async with staged(Path(folder)) as stage:
            for _ in range(3):
                await stage.push()
            await stage.generate()
            idle = [await stage.push() for _ in range(SWAPS)]
            loaded = await swaps_under_load(stage)
            still, swapping, swaps = await batches(stage)
            joined = await late_joiner(stage, Path(folder))
    stall = statistics.median(commit.stall_seconds for commit, _ in loaded)
    reload = statistics.median(commit.reload_seconds for commit, _ in idle)
    return {
        "reload_ms": 1e3 * reload,
        "reload_under_load_ms": 1e3 * statistics.median(commit.reload_seconds for commit, _ in loaded),
        "stall_idle_ms": 1e3 * statistics.median(commit.stall_seconds for commit, _ in idle),
        "stall_ms": 1e3 * stall,
        "stall_over_reload_ms": 1e3 * (stall - reload),
        "publish_to_ack_idle_ms": 1e3 * statistics.median(seconds for _, seconds in idle),
        "publish_to_ack_ms": 1e3 * statistics.median(seconds for _, seconds in loaded),
        "batch_s": still,
        "batch_cost_per_swap_ms": 1e3 * (swapping - still) / swaps,
        **joined,
    }


async def late_joiner(stage: Stage, folder: Path) -> dict[str, float]:
    """Starts a second replica, which gets only the address of Redis, and waits for its first token."""
    expected = await first_token(stage, stage.address)
    stage.arena.unlink()  # as on another host
    command = [sys.executable, "-m", "polyreme", "rollout", "--redis", stage.redis_url, "--run", stage.run.run_id]
    started = time.perf_counter()
    joiner = Child.spawn("joiner", command, log_path=folder / "joiner.log")
    try:
        leases = await Registry(stage.run).wait_for("rollout", 2, JOIN_SECONDS, alive=lambda: joiner.poll() is None)
        leased = time.perf_counter()
        [address] = [lease.address for lease in leases if lease.address != stage.address]
        if await first_token(stage, address) != expected:
            raise SystemExit("the first token of the late joiner differs from that of the version")
        ended = time.perf_counter()
    finally:
        await joiner.stop(grace=20)
    return {"late_joiner_s": ended - started, "late_joiner_after_lease_s": ended - leased}


async def first_token(stage: Stage, address: str) -> bytes:
    """Returns the most probable token of the newest version, as soon as the replica serves it."""
    prompt = torch.arange(4, 24, dtype=torch.int32).numpy().tobytes()
    request = pb.GenerateRequest(
        run_id=stage.run.run_id,
        request_id=uuid.uuid4().hex,
        prompt_ids=prompt,
        slots=[pb.Slot(max_new=1)],
        sampling=pb.SamplingParams(temperature=0.0, top_p=1.0, top_k=-1),
        min_version=stage.version,
    )
    deadline = time.monotonic() + JOIN_SECONDS
    async with rpc.connect(address) as channel:
        while True:
            try:
                async for message in pb_grpc.RolloutServiceStub(channel).Generate(request, timeout=JOIN_SECONDS):
                    for chunk in message.chunks:
                        return bytes(chunk.token_ids)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.FAILED_PRECONDITION or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.005)


async def swaps_under_load(stage: Stage) -> list[tuple[Commit, float]]:
    """Measures SWAPS swaps, each in the middle of a batch."""
    swaps: list[tuple[Commit, float]] = []
    while len(swaps) < SWAPS:
        batch = asyncio.create_task(stage.generate())
        await asyncio.sleep(SWAP_INTERVAL_SECONDS)
        while not batch.done() and len(swaps) < SWAPS:
            pushed = await stage.push()
            if not batch.done():
                swaps.append(pushed)
            await asyncio.sleep(SWAP_INTERVAL_SECONDS)
        await batch
    return swaps


async def batches(stage: Stage) -> tuple[float, float, float]:
    """Returns the median seconds of a batch without and with swaps, measured in turn, and the mean number of swaps in a batch."""
    still, swapping, swaps = [], [], 0
    for _ in range(BATCH_ROUNDS):
        started = time.perf_counter()
        await stage.generate()
        still.append(time.perf_counter() - started)
        started = time.perf_counter()
        batch = asyncio.create_task(stage.generate())
        while not batch.done():
            await asyncio.wait({batch}, timeout=SWAP_INTERVAL_SECONDS)
            if not batch.done():
                await stage.push()
                swaps += 1
        await batch
        swapping.append(time.perf_counter() - started)
    return statistics.median(still), statistics.median(swapping), swaps / BATCH_ROUNDS
