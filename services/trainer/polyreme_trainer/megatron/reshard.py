"""Cuts the saved state of ranks anew, for ranks of the same or of another layout.

Every rank saves the weights of its trained parameters and the parts of their moments that it updates (`RankState`). The mapping table says
which elements of the Hugging Face tensors these are, so it leads from the ranks that saved to the ranks that load.

Invariant: numbers are copied, never computed. Ranks of the same layout get back the bits that they saved, and every layout gets the same
model and moments.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyreme_trainer.megatron.families.base import Architecture
from polyreme_trainer.megatron.hf_mapping import Rank, Slice, hf_shapes, is_expert, param_shapes, rank_slices

WEIGHTS = "weights"
"""Kind of state: the weights of the parameters that training changes. The others are the optimizer's: moments, and full-precision copies."""

RankState = Mapping[str, Any]
"""One role on one rank: `steps`, the optimizer's steps; and by kind of state and parameter a pair (start, flat tensor): the elements from
`start` on of the flat parameter. Data ranks have different elements, or no element, of the same parameters, or have other experts."""


@dataclass(frozen=True)
class RankMesh:
    """The numbers of ranks in each direction. Ranks are numbered as in megatron-core: tensor ranks are adjacent, then data ranks.

    data: data ranks x context ranks, which have the same weights alike. Of a data rank, the context ranks are adjacent.
    expert: so many adjacent data ranks share the experts.
    virtual_pipeline: the virtual stages of each stage.
    expert_tensor: the ranks that cut each expert; 0: the tensor ranks.
    """

    tensor: int
    pipeline: int
    data: int
    expert: int = 1
    virtual_pipeline: int = 1
    expert_tensor: int = 0

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def shards(self) -> list[Rank]:
        """The ranks that together have the whole model once."""
        first = Rank(tp=self.tensor, pp=self.pipeline, ep=self.expert, vpp=self.virtual_pipeline, etp=self.expert_tensor)
        stages = [replace(first, pp_rank=stage) for stage in range(self.pipeline)]
        return [stage.at(place) for stage in stages for place in range(stage.places)]

    def files(self, here: Rank) -> list["ShardFiles"]:
        """What the rank `here` of a perhaps different layout reads."""
        shards = self.shards
        return [self._files_of(shard) for shard in ([here] if here in shards else shards)]

    def _files_of(self, shard: Rank) -> "ShardFiles":
        ranks = self.tensor * self.data
        others = [shard.at(number) for number in range(ranks)]
        experts = shard.ep_rank, shard.expert_cut.tp_rank
        start = ranks * shard.pp_rank
        return ShardFiles(
            shard,
            [start + number for number, other in enumerate(others) if other.tp_rank == shard.tp_rank],
            [start + number for number, other in enumerate(others) if (other.ep_rank, other.expert_cut.tp_rank) == experts],
        )


@dataclass(frozen=True)
class ShardFiles:
    """A shard of the model, and the numbers of the ranks that saved it: of those with its experts, and of those with the rest of it."""

    rank: Rank
    numbers: list[int]
    expert_numbers: list[int]


class SavedShard:
    """A model-parallel rank's saved state of one role, put together from its data ranks.

    Args:
        files: the ranks that saved it.
        states: those of the ranks, by number.
    """

    def __init__(self, arch: Architecture, files: ShardFiles, states: Mapping[int, RankState]) -> None:
        self.rank, self.slices = files.rank, rank_slices(arch, files.rank)
        self._states = [states[number] for number in files.numbers]
        self._expert_states = [states[number] for number in files.expert_numbers]
        self._shapes = param_shapes(arch, files.rank)
        self._newest: tuple[str, str, Tensor] | None = None

    def param(self, kind: str, name: str) -> Tensor:
        """One kind of state of a whole parameter. Raises RuntimeError when the data ranks' parts do not fill it."""
        if self._newest is None or self._newest[:2] != (kind, name):  # a parameter has several slices
            states = self._expert_states if is_expert(name) else self._states
            parts = sorted((state[kind][name] for state in states if name in state[kind]), key=lambda part: part[0])
            flat = parts[0][1] if len(parts) == 1 else torch.cat([part for _, part in parts])
            self._newest = kind, name, flat.view(self._shapes[name])
        return self._newest[2]

    def dtype(self, kind: str) -> torch.dtype:
        """The dtype of a kind of state."""
        return next(part.dtype for state in self._states for _, part in state[kind].values())


def reshard(arch: Architecture, kind: str, names: Iterable[str], here: Rank, shards: Sequence[SavedShard]) -> dict[str, Tensor]:
    """One kind of state of the rank `here`'s parameters `names`, whole; padding is zero.

    Args:
        shards: all shards of the layout that saved; or, if `here` is one of its ranks, that rank's alone.
    """
    wanted: dict[str, list[Slice]] = {}
    chosen = set(names)
    for piece in rank_slices(arch, here):
        if piece.param in chosen:
            wanted.setdefault(piece.hf_name, []).append(piece)
    own = len(shards) == 1 and shards[0].rank == here
    sources: dict[str, list[tuple[SavedShard, Slice]]] = {name: [] for name in wanted}
    for shard in shards:
        for piece in shard.slices:
            if piece.hf_name in wanted and (own or piece.primary):
                sources[piece.hf_name].append((shard, piece))
    shapes, mine, dtype = hf_shapes(arch), param_shapes(arch, here), shards[0].dtype(kind)
    result = {name: torch.zeros(mine[name], dtype=dtype) for name in chosen}
    for name, pieces in wanted.items():
        whole = torch.empty(shapes[name], dtype=dtype)
        for shard, piece in sources[name]:
            whole[piece.hf_index].copy_(shard.param(kind, piece.param)[piece.param_index])
        for piece in pieces:
            result[piece.param][piece.param_index].copy_(whole[piece.hf_index])
    return result
