"""The version writer: the first copy of the model writes its slices of the policy into one arena slot.

The first copy is on data rank 0's tensor ranks and stages; with expert ranks, also on the next data ranks', until it is complete.

Where these ranks are on several machines, the first rank of each owns an arena with the tensors that the machine writes: a part
of the version, in the same slot everywhere. Otherwise rank 0 owns the arena of the only part. Each tensor is in one part.

Invariant: a sealed version is complete: every byte was written between the slot's `begin` and its `complete`. If
several ranks write, all wait at a barrier before and after. The owner of an arena seals its part; rank 0 has all manifests.
"""

import logging
import os
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.config.security import SecurityConfig
from polyreme.errors import ConfigError
from polyreme.net.endpoint import own_address
from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import Manifest, RemotePart, plan_manifest, tensor_views
from polyreme_trainer.learner.engine import Written
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.huggingface.hf_mapping import hf_aliases
from polyreme_trainer.megatron.models.model import ShardedModel, tensor_specs
from polyreme_trainer.weight_sync.part_server import PartServer, check_part_server

logger = logging.getLogger(__name__)

_WORDS = {"BF16": torch.bfloat16}


class VersionWriter:
    """Writes versions of one policy into arena slots. `open` comes first.

    Args:
        policy: the policy; its shapes determine the size of an arena slot.
        ranks: the learner's ranks.
        run_id: names the arena.
        writes: whether this rank writes its slices: it is one of the first data ranks that together have all experts.
        nodes: the number of machines, which share the ranks evenly.
        security: of the ports at which replicas fetch the parts of other machines.
        anchor_interval: of the deltas that other machines compute: see `Deltas`.
    """

    arena: Arena
    """This machine's, on the ranks that write or own it."""

    def __init__(
        self,
        policy: ShardedModel,
        ranks: Ranks,
        run_id: str,
        writes: bool,
        nodes: int = 1,
        security: SecurityConfig | None = None,
        anchor_interval: int = 1,
    ) -> None:
        self._policy, self._ranks, self._run_id, self._writes = policy, ranks, run_id, writes
        self._nodes, self._security, self._interval = nodes, security, anchor_interval
        self.parts, self._owns = 1, ranks.leads
        self._server: PartServer | None = None

    def open(self) -> "VersionWriter":
        """Plans the parts and creates the arenas. Collective: all ranks open their writer together.

        Raises:
            ConfigError: shared memory is too small, ranks of several machines write slices of one tensor, or their tokens differ.
            UnavailableError: rank 0 cannot reach the part of another machine.
        """
        policy, ranks, nodes, writes = self._policy, self._ranks, self._nodes, self._writes
        specs, aliases = tensor_specs(policy.arch, policy.dtype), hf_aliases(policy.arch)
        part = 0
        if nodes > 1:
            planned = gather_parts(policy.written if writes else (), nodes)
            part, self.parts = machine_of(ranks.rank, dist.get_world_size(), nodes), len(planned)
            self._owns = part < self.parts and ranks.rank % (dist.get_world_size() // nodes) == 0
            mine = planned[part] if part < self.parts else frozenset()
            specs = [spec for spec in specs if spec.name in mine]
            aliases = {alias: name for alias, name in aliases.items() if name in mine}
        self._plan = plan_manifest(specs, aliases, min(part, self.parts - 1), self.parts)
        self._dtypes = {tensor.name: _WORDS.get(tensor.dtype) for tensor in self._plan.tensors if not tensor.alias_of}

        async def create() -> bytes:
            self.arena = Arena.create(self._run_id, self._plan.nbytes)
            return str(self.arena.path).encode()

        path = ranks.broadcast_from_leader(create).decode()
        if self.parts > 1:
            path = self._serve_parts(path, part, self._security)
        if writes and not self._owns:
            self.arena = Arena.open(path, writable=True)
        if writes and policy.device.kind == "cuda":
            self.arena.page_lock(torch)
        return self

    def _serve_parts(self, path: str, part: int, security: SecurityConfig | None) -> str:
        """Creates the arenas of the other machines and serves them. Returns the path of this machine's arena. Collective.

        Raises as `check_part_server`.
        """
        address = ""
        if self._owns and not self._ranks.leads:
            self.arena = Arena.create(self._run_id, self._plan.nbytes, part=part)
            threads = dist.get_world_size() // self._nodes  # one for each rank of this machine
            host = own_address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            self._server = PartServer(self.arena, part, self._run_id, host, security, self._interval, threads)
            self._server.start()
            path, address = str(self.arena.path), self._server.address
            logger.info("serving part %d of the weights at %s", part, address)
        owned: list[tuple[str, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(owned, (path, address) if self._owns else None)
        arenas = [found for found in owned if found]
        self._addresses = [address for _, address in arenas]

        async def check() -> None:
            for number, served in enumerate(self._addresses):
                if served:
                    await check_part_server(served, number, security)

        self._ranks.on_leader(check)
        return arenas[part][0] if part < len(arenas) else ""

    def write(self, slot: int, version: int, term: int) -> Written:
        """Writes the policy into arena slot `slot` as `version`. Collective."""
        several = self._policy.rank.places * self._policy.rank.pp > 1  # ranks write; otherwise rank 0 does, and waits for nobody
        if self._owns:
            self.arena.begin(slot)
        if several:
            dist.barrier()
        if self._writes:
            self._policy.use()
            self._policy.write_slices(self.tensors(slot))
            self._policy.device.synchronize()
        if several:
            dist.barrier()
        if not self._owns:
            self._gather(None)
            return Written(None, slot, 0)
        sealed = seal(self._plan.stamped(self._run_id, term, version), self.arena.slot_view(slot))
        generation = self.arena.complete(slot, version, term)
        if self._server is not None:
            self._server.publish(sealed, slot, generation)
        others = self._gather(sealed)
        return Written(sealed, slot, generation, parts=others) if self._ranks.leads else Written(None, slot, 0)

    def _gather(self, sealed: Manifest | None) -> tuple[RemotePart, ...]:
        """The other machines' parts, on rank 0. Collective with several parts. `sealed`: this machine's, from its owner."""
        if self.parts == 1:
            return ()
        mine = None if sealed is None or self._ranks.leads else sealed.to_proto().SerializeToString()
        found: list[bytes | None] | None = [None] * dist.get_world_size() if self._ranks.leads else None
        dist.gather_object(mine, found, dst=0)
        manifests = [Manifest.from_proto(pb.Manifest.FromString(part)) for part in found or () if part]
        return tuple(RemotePart(part, self._addresses[part.part]) for part in manifests)

    def tensors(self, slot: int) -> Mapping[str, Tensor]:
        """The tensors of this machine's part by Hugging Face name, without aliases. They share the arena's memory."""
        views = tensor_views(self._plan, self.arena.slot_view(slot))
        return {
            name: torch.from_numpy(views[name]) if dtype is None else torch.from_numpy(views[name]).view(dtype)
            for name, dtype in self._dtypes.items()
        }

    def close(self) -> None:
        """Closes the arena; its owner removes it."""
        if self._server is not None:
            self._server.close()
        if self._writes or self._owns:
            self.arena.close()


def machine_of(rank: int, ranks: int, nodes: int) -> int:
    """The machine of a rank. Machines have equally many ranks, in order."""
    return rank // (ranks // nodes)


def plan_parts(written: Sequence[Collection[str]], nodes: int) -> list[frozenset[str]]:
    """The tensors of each part. Pure.

    Args:
        written: for each rank, the names of the tensors of which it writes a slice.
        nodes: the number of machines.

    Returns:
        One set of names for each machine that writes any: the first ones.

    Raises:
        ConfigError: ranks of several machines write slices of one tensor.
    """
    parts: list[set[str]] = [set() for _ in range(nodes)]
    for rank, names in enumerate(written):
        parts[machine_of(rank, len(written), nodes)] |= set(names)
    holders: dict[str, int] = {}
    for machine, names in enumerate(parts):
        for name in sorted(names):
            if (first := holders.setdefault(name, machine)) != machine:
                raise ConfigError(
                    "every tensor of the model on the ranks of one machine",
                    f"slices of {name} on machines {first} and {machine}",
                    "Change trainer.parallel, so that tensor ranks and expert tensor ranks share a machine.",
                )
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    return [frozenset(names) for names in parts]


def gather_parts(mine: Collection[str], nodes: int) -> list[frozenset[str]]:
    """`plan_parts` of all ranks; `mine` is what this rank writes. Collective."""
    written: list[Collection[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(written, sorted(mine))
    return plan_parts(written, nodes)
