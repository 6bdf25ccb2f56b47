"""The version writer: the first copy of the model writes its slices of the policy into one arena slot.

The first copy is on data rank 0's tensor ranks and stages; with expert ranks, also on those of the next data ranks, until all experts are there.

Invariant: a sealed version is complete: every byte was written between the slot's `begin` and its `complete`. All other ranks wait at the
barrier. Rank 0 owns the arena and seals the version.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import plan_manifest, tensor_views
from polyreme_trainer.learner.engine import Written
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.hf_mapping import hf_aliases
from polyreme_trainer.megatron.model import ShardedModel, tensor_specs

_WORDS = {"BF16": torch.bfloat16}


class VersionWriter:
    """Writes versions of one policy into arena slots.

    Args:
        policy: the policy; its shapes determine the size of an arena slot.
        ranks: the learner's ranks. All of them construct their writer together.
        run_id: names the arena.
        writes: whether this rank writes its slices: it is one of the first data ranks that together have all experts.
    """

    def __init__(self, policy: ShardedModel, ranks: Ranks, run_id: str, writes: bool) -> None:
        self._policy, self._ranks, self._run_id, self._writes = policy, ranks, run_id, writes
        self._plan = plan_manifest(tensor_specs(policy.arch, policy.dtype), hf_aliases(policy.arch))
        self._dtypes = {tensor.name: _WORDS.get(tensor.dtype) for tensor in self._plan.tensors if not tensor.alias_of}

        async def create() -> bytes:
            self.arena = Arena.create(run_id, self._plan.nbytes)
            return str(self.arena.path).encode()

        path = ranks.broadcast_from_leader(create).decode()
        if writes and not ranks.leads:
            self.arena = Arena.open(path, writable=True)

    def write(self, slot: int, version: int, term: int) -> Written:
        """Writes the policy into arena slot `slot` as `version`. Collective."""
        if self._ranks.leads:
            self.arena.begin(slot)
        dist.barrier()
        if self._writes:
            self._policy.use()
            self._policy.write_slices(self.tensors(slot))
            self._policy.device.synchronize()
        dist.barrier()
        if not self._ranks.leads:
            return Written(None, slot, 0)
        sealed = seal(self._plan.stamped(self._run_id, term, version), self.arena.slot_view(slot))
        return Written(sealed, slot, self.arena.complete(slot, version, term))

    def tensors(self, slot: int) -> Mapping[str, Tensor]:
        """The arena slot's tensors by Hugging Face name, without aliases. They share the arena's memory."""
        views = tensor_views(self._plan, self.arena.slot_view(slot))
        return {
            name: torch.from_numpy(views[name]) if dtype is None else torch.from_numpy(views[name]).view(dtype)
            for name, dtype in self._dtypes.items()
        }

    def close(self) -> None:
        """Closes the arena; rank 0 removes it."""
        if self._writes or self._ranks.leads:
            self.arena.close()
