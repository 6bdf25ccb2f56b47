"""Sequences in one row of tokens, one after the other, and the description of them that attention needs.

Sequences that begin alike, as one prompt's samples do, may share these first tokens: all but attention is then computed once.

Invariant: a token's position is counted from the start of its own sequence. Between sequences there is no padding; an alignment
adds tokens at the end only, as a separate sequence. A sequence's queries belong to the last of the tokens whose keys they see.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyreme_trainer.megatron.batches.attention_blocks import cut_pieces, plan_pieces
from polyreme_trainer.megatron.batches.attention_layout import Layout, lay_out
from polyreme_trainer.megatron.batches.context_cut import Cut
from polyreme_trainer.megatron.mcore import PackedSeqParams

IntArray = NDArray[np.int64]


ANGLES = 32
"""Angles are computed for a multiple of this many positions, so that an angle has the same cosine beside longer sequences."""


@dataclass(frozen=True)
class PackedIds:
    """The tokens of several sequences.

    Attributes:
        ids: int64 [t], all tokens.
        lengths: the number of tokens of each sequence, 1 or more.
        places: int64 [sum of lengths], the token at each place of the sequences, one sequence after the other. None: the
            sequences have no tokens in common, so the tokens are in this order.
        runs: the number of sequences of each run, whose attention is planned alone, see `shared_pass`. Empty: all are one run.
    """

    ids: Tensor
    lengths: tuple[int, ...]
    places: IntArray | None = None
    runs: tuple[int, ...] = ()

    @classmethod
    def of_rows(cls, ids: Tensor) -> Self:
        """The rows of int64 ids [b, s], each a sequence. Its results have the rows' padding, if any, at the same places."""
        return cls(ids.reshape(-1), (ids.shape[1],) * ids.shape[0])

    @classmethod
    def of(cls, ids: "Tensor | PackedIds") -> "PackedIds":
        """`ids`, which are packed or the rows of `of_rows`."""
        return ids if isinstance(ids, PackedIds) else cls.of_rows(ids)

    @property
    def shape(self) -> torch.Size:
        """The shape of one number per token."""
        return self.ids.shape

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        return self.ids.device

    def aligned(self, multiple: int) -> "PackedIds":
        """The same with a number of tokens that `multiple` divides; id 0 is added at the end."""
        count = len(self.ids)
        if not (missing := -count % multiple):
            return self
        places = None if self.places is None else np.append(self.places, np.arange(count, count + missing))
        runs = (*self.runs, 1) if self.runs else ()
        return PackedIds(torch.nn.functional.pad(self.ids, (0, missing)), (*self.lengths, missing), places, runs)


@dataclass(frozen=True)
class Copies:
    """The places of t tokens in sequences that have some of them in common.

    Attributes:
        tokens: int64 [p], the token at each of the p places.
        order: int64 [p], the places of the first token, then those of the second, ...
        starts: int64 [t], the first entry of each token in `order`.
        first: int64 [t], the first place of each token.
    """

    tokens: Tensor
    order: Tensor
    starts: Tensor
    first: Tensor

    @classmethod
    def of(cls, places: IntArray, device: torch.device) -> Self:
        """The copies at `PackedIds.places`."""
        order, counts = np.argsort(places, kind="stable"), np.bincount(places)
        starts = np.cumsum(counts) - counts
        return cls(*(torch.from_numpy(each).to(device) for each in (places, order, starts, order[starts])))


@dataclass
class Packing(PackedSeqParams):
    """megatron-core's parameters of packed sequences, with the rotary angles of all tokens.

    Attributes:
        lengths: the number of queries of each sequence.
        key_lengths: the number of keys of each sequence.
        features: the width of all queries of this rank.
        runs: see `PackedIds`.
        full, sliding: cos and sin of layers with full attention and with a window: [t, 1, features / 2] in the compute dtype.
        halves: on a rank that has a part of each sequence, the packings of its queries, one for each half; otherwise empty.
        keys: for a half, the positions of its keys among the gathered keys.
        copies: the tokens that sequences have in common; None: there are none.
    """

    lengths: tuple[int, ...] = ()
    key_lengths: tuple[int, ...] = ()
    features: int = 1
    runs: tuple[int, ...] = ()
    full: tuple[Tensor, ...] = field(default=(), repr=False)
    sliding: tuple[Tensor, ...] = field(default=(), repr=False)
    halves: "tuple[Packing, ...]" = field(default=(), repr=False)
    keys: Tensor | None = field(default=None, repr=False)
    copies: Copies | None = field(default=None, repr=False)
    _layouts: dict[int | None, Layout] = field(default_factory=dict, repr=False)

    def layout(self, window: int | None) -> Layout:
        """The blocks in which layers with this window run. All of them share it."""
        if window not in self._layouts:
            lengths, key_lengths = (np.array(each, dtype=np.int64) for each in (self.lengths, self.key_lengths))
            pieces = cut_pieces(lengths, key_lengths, window)
            plan = plan_pieces(pieces, self.features, window, self.runs)
            self._layouts[window] = lay_out(pieces, plan, window, self.cu_seqlens_q.device)
        return self._layouts[window]

    @cached_property
    def ends(self) -> list[int]:
        """The number of queries up to the end of each sequence."""
        return np.cumsum(self.lengths).tolist()

    @cached_property
    def key_ends(self) -> list[int]:
        """The number of keys up to the end of each sequence."""
        return np.cumsum(self.key_lengths).tolist()


def packing(
    packed: PackedIds, features: int, full: Tensor, sliding: Tensor | None, dtype: torch.dtype, cut: Cut | None = None
) -> Packing:
    """The description of `packed` for attention.

    Args:
        features: the width of all queries of this rank.
        full, sliding: the rotary angles of the first positions, fp32 [positions, features / 2]; `sliding` None: as `full`.
        dtype: the compute dtype.
        cut: the tokens of a context rank; None: all. Then the sequences have no tokens in common.
    """
    assert cut is None or packed.places is None, "context ranks cut sequences with their own tokens"
    lengths, device = packed.lengths, packed.device
    # In whole vectors: torch computes the cosines that remain after the last one by another formula.
    longest = -(-max(lengths) // ANGLES) * ANGLES
    positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])).to(device)
    copies = None if packed.places is None else Copies.of(packed.places, device)
    if cut is not None:
        positions = positions.index_select(0, cut.tokens)
    if copies is not None:
        positions = positions.index_select(0, copies.first)

    def rotation(angles: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            part.to(dtype).index_select(0, positions).unsqueeze(1) for part in (angles[:longest].cos(), angles[:longest].sin())
        )

    rotated = rotation(full)
    halves = () if cut is None else cut.halves
    return replace(
        _of_lengths(lengths, lengths, features, device),
        runs=packed.runs,
        full=rotated,
        sliding=rotated if sliding is None else rotation(sliding),
        copies=copies,
        halves=tuple(replace(_of_lengths(half.lengths, half.key_lengths, features, device), keys=half.keys) for half in halves),
    )


def _of_lengths(lengths: tuple[int, ...], key_lengths: tuple[int, ...], features: int, device: torch.device) -> Packing:
    """The packing of sequences with these numbers of queries and keys."""
    starts, key_starts = (torch.from_numpy(np.cumsum([0, *each], dtype=np.int32)).to(device) for each in (lengths, key_lengths))
    return Packing(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=key_starts,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(key_lengths),
        lengths=lengths,
        key_lengths=key_lengths,
        features=features,
    )
