"""A learner on several machines, in one process: the first publishes, each other one has an arena and a part server."""

from collections.abc import Awaitable, Callable

import numpy as np

from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import Manifest, RemotePart, TensorSpec, plan_manifest, tensor_views
from polyreme_trainer.weight_sync.part_server import PartServer
from support.publishing import World
from support.receiver import Receiver

INTERVAL = 4
"""Versions between two anchors."""
PARTS = [
    plan_manifest([TensorSpec("embed", "F32", (7, 4)), TensorSpec("low", "BF16", (9999,))], {"head": "embed"}, 0, 3),
    plan_manifest([TensorSpec("high", "F32", (300, 200)), TensorSpec("norm", "BF16", (5,))], None, 1, 3),
    plan_manifest([TensorSpec("last", "BF16", (70, 300))], None, 2, 3),
]
NAMES = ["embed", "low", "high", "norm", "last"]


class Machines:
    """The machines, and what they publish. `world` has the first one's arena, for `PARTS[0]`; `server` is the class of the others' servers."""

    def __init__(self, world: World, server: type[PartServer] = PartServer) -> None:
        self.world, self.version, self.server = world, -1, server
        run_id = world.run.run_id
        self.arenas = [world.arena, *(Arena.create(run_id, layout.nbytes, part=layout.part) for layout in PARTS[1:])]
        self.servers = {part: self.serve(part) for part in range(1, len(PARTS))}
        self.lost: set[int] = set()
        self.weights: dict[str, np.ndarray] = {}

    def serve(self, part: int) -> PartServer:
        server = self.server(self.arenas[part], part, self.world.run.run_id, "127.0.0.1", anchor_interval=INTERVAL, threads=2)
        server.start()
        return server

    async def step(
        self,
        fraction: float = 1.0,
        damaged: bool = False,
        between: Callable[[], Awaitable[None]] | None = None,
        dense: tuple[int, ...] = (),
    ) -> dict[str, np.ndarray]:
        """Publishes the next version and returns its tensors.

        Args:
            fraction: of the elements get random bits.
            damaged: the second machine's bytes change after their digests.
            between: awaited when the first part is sealed and the second is being written.
            dense: parts of which all elements get random bits.
        """
        self.version += 1
        world, version = self.world, self.version
        slot = await world.publisher.acquire_slot(300)
        weights: dict[str, np.ndarray] = {}
        sealed: list[Manifest] = []
        generations = []
        for arena, layout in zip(self.arenas, PARTS, strict=True):
            arena.begin(slot)
            for name, view in tensor_views(layout, arena.slot_view(slot)).items():
                if name != "head":
                    noise = np.frombuffer(world.rng.bytes(view.nbytes), view.dtype).reshape(view.shape)
                    changed = world.rng.random(view.shape) < (1.0 if layout.part in dense else fraction)
                    view[...] = np.where(changed, noise, self.weights.get(name, noise))
                weights[name] = view.copy()
            if layout.part == 1 and between:
                await between()
            sealed.append(seal(layout.stamped(world.run.run_id, world.term, version), arena.slot_view(slot)))
            generations.append(arena.complete(slot, version, world.term))
            if layout.part and layout.part not in self.lost:
                self.servers[layout.part].publish(sealed[-1], slot, generations[-1])
        self.weights = weights | {"head": weights["embed"]}
        if damaged:
            self.arenas[1].slot_view(slot)[12345] ^= 1
        parts = tuple(RemotePart(each, self.servers[each.part].address) for each in sealed[1:])
        world.publisher.publish(sealed[0], slot, generations[0], parts=parts)
        return self.weights

    def lose(self, part: int) -> None:
        """Ends the server of a part."""
        self.servers[part].close()
        self.lost.add(part)

    def bring_back(self, part: int) -> None:
        self.servers[part] = self.serve(part)
        self.lost.remove(part)

    def receiver(self) -> Receiver:
        return Receiver(self.world.run.run_id, NAMES)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
        for arena in self.arenas[1:]:
            arena.close()
