"""Measurements of the stream path: the learner's link and publisher, and the replica's service, in separate processes."""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil  # type: ignore[import-untyped]
from weights_side.replica import names

from polyreme.config.run import RunConfig
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.leases import Registry
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.process.lifecycle import die_with_parent
from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest
from polyreme_trainer.weight_sync.publisher import Publisher
from polyreme_trainer.weight_sync.replica_client import ReplicaClient
from polyreme_trainer.weight_sync.version import Version
from support.machines import missing, network
from support.receiver import lease

TENSORS = 64
SHAPED_BITS = 2.5e9
SHAPED_RATE = "2500mbit"
BENCH = Path(__file__).resolve().parents[1]


class Versions:
    """Versions of `nbytes` that differ in every tensor, in an arena of this process."""

    def __init__(self, nbytes: int, run_id: str, tensors: int = TENSORS) -> None:
        per_tensor = nbytes // tensors // 64 * 64
        self.plan = plan_manifest([TensorSpec(name, "U8", (per_tensor,)) for name in names(tensors)])
        self.run_id, self.arena = run_id, Arena.create(run_id, self.plan.nbytes)
        self._noise = np.random.default_rng(0).integers(0, 256, per_tensor, np.uint8)
        self.number = -1

    def write(self, slot: int) -> tuple[Manifest, int]:
        """Writes and seals the next version. Returns its generation."""
        self.number += 1
        self.arena.begin(slot)
        view = np.frombuffer(self.arena.slot_view(slot), np.uint8)
        for tensor in self.plan.tensors:
            view[tensor.offset : tensor.offset + tensor.nbytes] = self._noise
            view[tensor.offset : tensor.offset + 8] = np.frombuffer(self.number.to_bytes(8, "little"), np.uint8)
        generation = self.arena.complete(slot, self.number, 1)
        return seal(self.plan.stamped(self.run_id, 1, self.number), self.arena.slot_view(slot)), generation

    def sealed(self, slot: int) -> Version:
        """Writes and seals the next version."""
        manifest, generation = self.write(slot)
        return Version(manifest.to_proto(), slot, generation)


def start_replica(
    kind: str, nbytes: int, run: str, host: str, place: Callable[[Sequence[str]], Sequence[str]], tensors: int = TENSORS
) -> "subprocess.Popen[bytes]":
    """Starts the weights service (`stream`) or a plain socket (`socket`) in a process at `place`, which prints its port."""
    command = [sys.executable, "-m", "weights_side.replica", host, kind, str(tensors), str(nbytes), run]
    paths = os.pathsep.join((str(BENCH), str(BENCH.parent / "tests")))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    parent = os.getpid()
    return subprocess.Popen(place(command), stdout=subprocess.PIPE, env=environment, preexec_fn=lambda: die_with_parent(parent))


@contextmanager
def peer(
    kind: str, nbytes: int, run: str, host: str = "127.0.0.1", place: Callable[[Sequence[str]], Sequence[str]] = tuple
) -> Iterator[int]:
    """Runs `start_replica` and yields its port."""
    process = start_replica(kind, nbytes, run, host, place)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()
            process.wait(20)


async def stream(link: ReplicaClient, versions: Versions, turn: int) -> float:
    """Returns the seconds of one version's transfer, including verification."""
    version = versions.sealed(turn % versions.arena.slots)
    began = time.perf_counter()
    await link.stream(version)
    seconds = time.perf_counter() - began
    await link.commit(version)
    return seconds


def bare(connection: socket.socket, data: memoryview) -> float:
    """Returns the seconds of as many bytes through a socket."""
    began = time.perf_counter()
    connection.sendall(data)
    connection.recv(1)
    return time.perf_counter() - began


async def against_socket(nbytes: int, repeats: int) -> dict[str, float]:
    """Measures a stream and a plain socket on the loopback, in turn, so that both run under the same load."""
    versions = Versions(nbytes, run_id())
    try:
        with peer("stream", nbytes, versions.run_id) as port, peer("socket", versions.plan.nbytes, versions.run_id) as bare_port:
            link = ReplicaClient(lease("bench", port), versions.arena)
            data = versions.arena.slot_view(0)[: versions.plan.nbytes]
            first = [await stream(link, versions, turn) for turn in range(2)]  # allocates its buffers
            with socket.create_connection(("127.0.0.1", bare_port)) as connection:
                bare(connection, data)
                streams, sockets = [], []
                for turn in range(repeats):
                    streams.append(await stream(link, versions, turn + 2))
                    sockets.append(bare(connection, data))
            await link.close()
    finally:
        versions.arena.close()
    gigabytes = versions.plan.nbytes / 1e9
    return {
        "stream_first_gb_s": gigabytes / first[0],
        "stream_gb_s": gigabytes / statistics.median(streams),
        "socket_gb_s": gigabytes / statistics.median(sockets),
        "stream_vs_socket": statistics.median(there / here for here, there in zip(streams, sockets, strict=True)),
    }


async def stream_costs(nbytes: int, repeats: int) -> tuple[float, float]:
    """Returns the processor seconds of a stream's sender and of its receiver; each the smallest of `repeats`."""
    versions = Versions(nbytes, run_id())
    try:
        with peer("stream", nbytes, versions.run_id) as port:
            [receiver] = psutil.Process().children()
            link, costs = ReplicaClient(lease("bench", port), versions.arena), []
            for turn in range(repeats + 2):
                version = versions.sealed(turn % versions.arena.slots)
                began = [spent(process) for process in (psutil.Process(), receiver)]
                await link.stream(version)
                costs.append(
                    [spent(process) - before for process, before in zip((psutil.Process(), receiver), began, strict=True)]
                )
                await link.commit(version)
            await link.close()
    finally:
        versions.arena.close()
    sender, receiver_seconds = (min(column) for column in zip(*costs[2:], strict=True))  # the first two allocate buffers
    return sender, receiver_seconds


def spent(process: psutil.Process) -> float:
    """Processor seconds of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def against_shaped_link(nbytes: int, repeats: int) -> dict[str, float]:
    """Measures a stream into a network namespace over a link of SHAPED_BITS per second. Empty if namespaces are not available."""
    if reason := missing():
        print(f"no shaped link: {reason}")
        return {}
    versions = Versions(nbytes, run_id())
    try:
        with network() as net:
            machine = net.add()
            machine.shape(SHAPED_RATE)
            with peer("stream", nbytes, versions.run_id, machine.address, machine.command) as port:
                link = ReplicaClient(replace(lease("bench", port), address=f"{machine.address}:{port}"), versions.arena)
                streams = [await stream(link, versions, turn) for turn in range(repeats + 2)][2:]
                await link.close()
    finally:
        versions.arena.close()
    rate = versions.plan.nbytes / statistics.median(streams)
    return {"shaped_mb_s": rate / 1e6, "stream_vs_shaped_link": 8 * rate / SHAPED_BITS}


async def to_many(nbytes: int, counts: Sequence[int], repeats: int, config: RunConfig) -> dict[str, float]:
    """Measures the publication to many receivers: total gigabytes per second, from publication to the last acknowledgement."""
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, EmbeddedServer.start(Path(folder)) as server:
        redis = await connect(server.url)
        for count in counts:
            run = await Run.create(redis, run_id(), config, {})
            seconds = await publish_to(run, server.url, nbytes, count, repeats)
            measured[f"receivers_{count}_s"] = seconds
            measured[f"receivers_{count}_gb_s"] = count * nbytes / 1e9 / seconds
        await redis.aclose()
    return measured


async def publish_to(run: Run, redis_url: str, nbytes: int, count: int, repeats: int) -> float:
    """Returns the median seconds from the publication of a version to the last of `count` commits."""
    term = await ExperienceLog(run).take(Writer.LEARNER)
    versions = Versions(nbytes, run.run_id)
    versions.arena.unlink()  # as on another host
    publisher = Publisher(redis_url, run.run_id, term, versions.arena)
    publisher.start()
    try:
        with ExitStack() as processes:
            ports = [processes.enter_context(peer("stream", nbytes, run.run_id)) for _ in range(count)]
            async with AsyncExitStack() as leases:
                for number, port in enumerate(ports):
                    await leases.enter_async_context(await Registry(run).register(lease(f"receiver{number}", port)))
                taken = []
                for _ in range(repeats + 2):
                    slot = await publisher.acquire_slot(30)
                    sealed, generation = versions.write(slot)
                    began = time.perf_counter()
                    publisher.publish(sealed, slot, generation)
                    await publisher.wait_committed(sealed.version, count, 300)
                    taken.append(time.perf_counter() - began)
    finally:
        publisher.close()
        versions.arena.close()
    return statistics.median(taken[2:])


def run_id() -> str:
    return f"bench-{uuid.uuid4().hex[:8]}"
