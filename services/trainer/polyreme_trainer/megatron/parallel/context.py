"""Context parallelism: ranks share the tokens of a micro-batch, and gather each other's keys and values for attention.

Invariant: every rank gets the joined outputs, so losses and metrics are computed from whole micro-batches. Code
outside the model does not depend on the split.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polyreme_trainer.megatron.batches.context_cut import Cut, cut_sequences
from polyreme_trainer.megatron.batches.packing import PackedIds
from polyreme_trainer.megatron.mcore import gather_from_sequence_parallel_region, parallel_state


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that share the tokens of this rank's micro-batches. A single rank has all of them.

    Args:
        rank, ranks: this rank's number among them, and their count.
        multiple: the number of tokens on each rank is a multiple of this.
    """

    rank: int
    ranks: int
    multiple: int

    def cut(self, ids: PackedIds) -> Cut:
        """This rank's tokens of `ids`, padded so that every rank has the same number."""
        lengths = ids.aligned(self.ranks * self.multiple).lengths
        return cut_sequences(lengths, self.rank, self.ranks, ids.device)

    def take(self, ids: PackedIds, values: Tensor, padding: int) -> Tensor:
        """Selects this rank's entries of an array with one number per token of `ids` [t]. Padding gets the value `padding`."""
        if self.ranks == 1:
            return values
        cut = self.cut(ids)
        return torch.nn.functional.pad(values, (0, len(cut.places) - len(values)), value=padding).index_select(0, cut.tokens)

    def join(self, ids: PackedIds, mine: Tensor) -> Tensor:
        """Joins the ranks' outputs for their tokens to those for all tokens of `ids` [t, ...], the same on each rank. Collective.

        Every rank computes the same loss from them, so each keeps the gradient of its own tokens and nothing is summed.
        """
        if self.ranks == 1:
            return mine
        group = parallel_state.get_context_parallel_group()
        every = gather_from_sequence_parallel_region(mine, tensor_parallel_output_grad=False, group=group)
        return every.index_select(0, self.cut(ids).places[: len(ids.ids)])


def gather_tokens(mine: Tensor) -> Tensor:
    """[t / ranks, ...] of each context rank -> [t, ...], rank by rank. Gradients are summed over the ranks. Collective."""
    every: Tensor = gather_from_sequence_parallel_region(mine, group=parallel_state.get_context_parallel_group())
    return every


def context_ranks(multiple: int) -> ContextRanks:
    """This process's ContextRanks. Requires `init_parallel`."""
    state = parallel_state
    return ContextRanks(state.get_context_parallel_rank(), state.get_context_parallel_world_size(), multiple)
