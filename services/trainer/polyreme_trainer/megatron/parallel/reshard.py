"""Divides the saved state of ranks again, for ranks of the same or of another layout.

Every rank saves the weights of its trained parameters and the parts of their moments that it updates (`RankState`). The mapping
table says which elements of the Hugging Face tensors these are, so it leads from the ranks that saved to the ranks that load.

Invariant: numbers are copied, never computed. The same layout gets back the saved bits, any layout the same model and moments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import (
    Rank,
    Slice,
    hf_shapes,
    is_expert,
    is_expert_bias,
    param_shapes,
    rank_slices,
)

WEIGHTS = "weights"
"""Kind of state: the weights that training changes. The others are the optimizer's: moments, and full-precision copies."""

RankState = Mapping[str, Any]
"""The state of one role on one rank. `steps` is the number of optimizer steps. For each kind of state and parameter there is a
pair (start, flat tensor): the elements of the flat parameter from `start` on. Of the same parameters, data ranks have different
elements or none; with expert ranks they also have different experts."""


@dataclass(frozen=True)
class RankMesh:
    """The numbers of ranks in each direction. Ranks are numbered as in megatron-core: tensor ranks are adjacent, then data ranks.

    data: data ranks x context ranks; all of them have the same weights. The context ranks of a data rank are adjacent.
    expert: the number of adjacent data ranks that share the experts.
    virtual_pipeline: the number of virtual stages of each stage.
    expert_tensor: the number of ranks that cut each expert; 0: the tensor ranks cut experts.
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
        """The files that the rank `here` reads; it may belong to another layout."""
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
    """A model's shard. `expert_numbers`: the ranks that saved its experts; `numbers`: the ranks that saved everything else."""

    rank: Rank
    numbers: list[int]
    expert_numbers: list[int]


class SavedShard:
    """A model-parallel rank's saved state of one role, put together from its data ranks.

    Args:
        files: the ranks that saved it.
        states: the states of these ranks, by number.
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
        """The dtype of a kind of state, except that of expert biases."""
        return next(part.dtype for state in self._states for name, (_, part) in state[kind].items() if not is_expert_bias(name))


Read = Callable[[str, Iterable[str]], dict[str, Tensor]]
"""Kind of state, names of parameters -> this rank's whole parameters."""


def reader(arch: Architecture, here: Rank, sources: Sequence[ShardFiles], states: Mapping[int, RankState]) -> Read:
    """What reads the state of a role for the rank `here`. states: those of the ranks of `sources`, by number."""
    shards = [SavedShard(arch, source, states) for source in sources]
    return lambda kind, names: reshard(arch, kind, names, here, shards)


def reshard(arch: Architecture, kind: str, names: Iterable[str], here: Rank, shards: Sequence[SavedShard]) -> dict[str, Tensor]:
    """One kind of state of the whole parameters `names` on the rank `here`; padding is zero.

    Args:
        shards: all shards of the layout that saved; if `here` is one of its ranks, only that rank's shard.
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
    result = {name: torch.zeros(mine[name], dtype=torch.float32 if is_expert_bias(name) else dtype) for name in chosen}
    for name, pieces in wanted.items():
        whole = torch.empty(shapes[name], dtype=result[pieces[0].param].dtype)
        for shard, piece in sources[name]:
            whole[piece.hf_index].copy_(shard.param(kind, piece.param)[piece.param_index])
        for piece in pieces:
            result[piece.param][piece.param_index].copy_(whole[piece.hf_index])
    return result
