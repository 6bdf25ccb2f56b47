"""Runs in the ranks of test_layouts: ranks that act as machines push versions of several parts to replicas, one of which joins late.

The first version, and one after a step that changes all weights, arrive whole; the later ones change few weights and arrive as deltas of all
parts.
"""

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from polyreme.config.load import parse_config
from polyreme.config.trainer import ParallelConfig
from polyreme.experience.leases import Registry
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import Run
from polyreme.experience.store import connect
from polyreme.weights.manifest import ALIGNMENT
from polyreme_trainer.learner.engine import Written
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.models.build import init_parallel
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.parallel.channel import BroadcastChannel
from polyreme_trainer.megatron.versions.version_writer import VersionWriter
from polyreme_trainer.memory.sharding import written_parameters
from polyreme_trainer.memory.state import WIDTHS
from polyreme_trainer.weight_sync.publisher import Publisher
from support.layout_checks import make_role, step
from support.publishing import CONFIG
from support.receiver import Receiver, replica

INTERVAL = 20  # the default
VERSIONS = 6  # more than an arena has slots
STEPPED = 1
"""The version that an optimizer step makes."""
STRIDE = 97
"""Of the later versions' changed weights, in every tensor."""
LATE = 3
"""The version at which a replica joins."""


class Push:
    """Rank 0's run, publisher and replicas. Every method runs on rank 0's event loop."""

    def __init__(self, redis_url: str, run_id: str, writer: VersionWriter, names: list[str]) -> None:
        self.redis_url, self.run_id, self.writer, self.names = redis_url, run_id, writer, names
        self.stack, self.receivers = AsyncExitStack(), list[Receiver]()

    async def begin(self) -> None:
        redis = await connect(self.redis_url)
        self.stack.push_async_callback(redis.aclose)
        self.run = await Run.create(redis, self.run_id, parse_config(CONFIG, "test"), {})
        self.term = await ExperienceLog(self.run).take(Writer.LEARNER)
        self.publisher = Publisher(self.redis_url, self.run_id, self.term, self.writer.arena)
        self.publisher.start()
        self.stack.callback(self.publisher.close)
        await self.join()

    async def join(self) -> None:
        name = f"r{len(self.receivers)}"
        receiver = Receiver(self.run_id, self.names)
        self.receivers.append(await self.stack.enter_async_context(replica(Registry(self.run), name, receiver)))

    async def slot(self) -> bytes:
        return f"{await self.publisher.acquire_slot(300)} {self.term.counter}".encode()


def check_push(model: str, layout: str, redis_url: str, run_id: str) -> None:
    """Every version that the replicas serve equals the weights that the ranks hold, bit by bit; the first is the model's own."""
    parallel, device = ParallelConfig(**json.loads(layout)), Device("cpu")
    init_parallel(parallel, device)
    role, ranks = make_role(model, "float32", device), Ranks(torch.distributed.get_rank(), BroadcastChannel(device.torch))
    writer = VersionWriter(role.model, ranks, run_id, role.model.writes, parallel.nodes, anchor_interval=INTERVAL).open()
    assert writer.parts == parallel.nodes
    if ranks.rank % parallel.ranks_per_node == 0:  # the owner of its machine's arena, which the estimate of memory has by machine
        estimated = WIDTHS["float32"] * written_parameters(role.model.arch, parallel)[ranks.rank // parallel.ranks_per_node]
        assert estimated <= writer.arena.slot_nbytes < estimated + ALIGNMENT * len(writer.tensors(0))
    files = load_file(Path(model) / "model.safetensors")
    push = Push(redis_url, run_id, writer, list(files))
    try:
        ranks.on_leader(push.begin)
        for version in range(VERSIONS):
            if version == STEPPED:
                step(role)
            elif version:
                change_few(role.model)
            slot, term = map(int, ranks.broadcast_from_leader(push.slot).split())
            written = writer.write(slot, version, term)
            full = role.model.full_tensors()
            ranks.on_leader(partial(serve, push, version, written, full, files))
        ranks.on_leader(push.stack.aclose)
    finally:
        writer.close()
        ranks.close()


@torch.no_grad()
def change_few(model: Policy) -> None:
    """Changes some weights of every tensor, on all ranks that hold it alike."""
    for weights in model.module.parameters():
        weights.view(-1)[::STRIDE] += 1.0


async def serve(
    push: Push, version: int, written: Written, full: Mapping[str, Tensor] | None, files: Mapping[str, Tensor]
) -> None:
    """Publishes the version and compares what the replicas serve with `full`, the gathered weights."""
    assert full is not None and written.manifest is not None and len(written.parts) == 1
    if version == LATE:
        await push.join()
    push.publisher.publish(written.manifest, written.slot, written.generation, parts=written.parts)
    commits = await push.publisher.wait_committed(version, len(push.receivers), 300)
    transfers = {commit.replica: commit.transfer for commit in commits}
    relayed = sum(transfer.relayed_bytes or 0 for transfer in transfers.values())
    if version < LATE:
        assert relayed == 0
    elif version > LATE:  # until then the contents differ
        sent = sum(transfer.bytes for transfer in transfers.values())
        assert sent == relayed > 0, "each machine sends its part once, and the other replica fetches it from the first"
    for name, transfer in transfers.items():
        joins = version == LATE and name == f"r{len(push.receivers) - 1}"
        if version <= STEPPED or joins:
            assert transfer.path == "stream" and transfer.density is None
        else:  # of every part: one whole part would have density 1
            assert transfer.path == "delta" and transfer.density is not None and transfer.density < 3 / STRIDE
    assert full.keys() == files.keys()
    for receiver in push.receivers:
        assert receiver.versions[-1] == version
        for name, tensor in full.items():
            assert receiver.weights[name].tobytes() == tensor.numpy().tobytes(), (version, name)
    unchanged = [name for name, tensor in full.items() if torch.equal(tensor, files[name])]
    assert len(unchanged) == (0 if version else len(files))
