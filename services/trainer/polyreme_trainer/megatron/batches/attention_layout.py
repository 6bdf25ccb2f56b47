"""The tokens and masks of planned attention blocks, on a device.

Invariant: no mask but `Layout.whole_mask` grows with the square of a sequence's length.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from polyreme_trainer.megatron.batches.attention_blocks import IntArray, Pieces
from polyreme_trainer.megatron.batches.context_cut import runs

UNSEEN = -1e30
"""The score of a key that is not seen. Finite: a query may see none of the keys before its piece."""


@dataclass(frozen=True)
class Blocks:
    """Padded blocks in which attention runs where no kernel takes packed sequences.

    Attributes:
        shapes: rows and width of each block.
        gather: int64 [p], the token at each of the p positions of all blocks; padding repeats a sequence's last token. None: p =
            t, and the positions are the tokens in their order.
        scatter: int64 [t], each token's position.
    """

    shapes: tuple[tuple[int, int], ...]
    gather: Tensor | None
    scatter: Tensor


@dataclass(frozen=True)
class Layout:
    """The blocks of queries, and the keys of each.

    Attributes:
        blocks: the blocks of the queries.
        keys: int64 [p], the key of the query at each position. None: queries and keys are of the same tokens.
        before: int64, the keys before the pieces of each block that has such, [rows, width] each, one block after the other; the
            last one is that before the piece. A row with fewer repeats its first one.
        widths: this width of each block; 0: its pieces see only their own keys.
        seen: the mask of each block's keys before, bool, [queries, width] or [rows, 1, 1, width]; None: all are seen.
    """

    blocks: Blocks
    keys: Tensor | None
    before: Tensor
    widths: tuple[int, ...]
    seen: tuple[Tensor | None, ...]
    _masks: dict[tuple[int, bool, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    def mask(self, number: int, dtype: torch.dtype) -> Tensor | None:
        """A block's mask `seen`, to add to scores; None: all seen. All layers share it: torch saves it for the backward pass."""
        seen = self.seen[number]
        if seen is not None and (number, False, dtype) not in self._masks:
            self._masks[number, False, dtype] = _scores(seen, dtype)
        return None if seen is None else self._masks[number, False, dtype]

    def whole_mask(self, number: int, dtype: torch.dtype) -> Tensor:
        """The mask of a block's keys before and own keys, [queries, width + queries] or [rows, 1, the same], to add to scores."""
        if (number, True, dtype) not in self._masks:
            queries, width, seen = self.blocks.shapes[number][1], self.widths[number], self.seen[number]
            own = torch.ones(queries, queries, dtype=torch.bool, device=self.before.device).tril_()
            seen = own.new_ones(queries, width) if seen is None else seen.expand(*seen.shape[:-2], queries, width)
            every = torch.cat([seen, own.expand(*seen.shape[:-1], queries)], dim=-1)
            self._masks[number, True, dtype] = _scores(every, dtype)
        return self._masks[number, True, dtype]


def _scores(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, UNSEEN)


def cut_blocks(lengths: IntArray, plan: list[IntArray], device: torch.device) -> Blocks:
    """The planned blocks of sequences that stand one after the other. `plan`: see `plan_blocks`."""
    starts = np.cumsum(lengths) - lengths
    shapes: list[tuple[int, int]] = []
    gathered: list[IntArray] = []
    scatter, base = np.empty(int(lengths.sum()), dtype=np.int64), 0
    for part in plan:
        width, columns = int(lengths[part].max()), np.arange(lengths[part].max())
        tokens = starts[part][:, None] + np.minimum(columns, lengths[part][:, None] - 1)
        real = columns < lengths[part][:, None]
        scatter[tokens[real]] = base + np.flatnonzero(real)
        shapes.append((len(part), width))
        gathered.append(tokens.ravel())
        base += tokens.size
    gather = np.concatenate(gathered)
    moved = base != len(scatter) or bool((gather != np.arange(base)).any())
    return Blocks(tuple(shapes), torch.from_numpy(gather).to(device) if moved else None, torch.from_numpy(scatter).to(device))


def lay_out(pieces: Pieces, plan: list[IntArray], window: int | None, device: torch.device) -> Layout:
    """The layout of planned pieces."""
    blocks = cut_blocks(pieces.lengths, plan, device)
    keys, tokens = runs(pieces.keys, pieces.lengths), int(pieces.lengths.sum())
    same = bool((keys == np.arange(tokens)).all())
    before, widths, masks = [np.empty(0, dtype=np.int64)], [], list[Tensor | None]()
    for part, (_, queries) in zip(plan, blocks.shapes, strict=True):
        seen, first = pieces.before[part, None], pieces.keys[part, None]
        width = int(seen.max())
        column = np.arange(width) - width  # counted from the piece
        before.append((first + np.maximum(column, -seen)).ravel())
        widths.append(width)
        if window is not None and width:
            masks.append(torch.from_numpy(column > np.arange(queries)[:, None] - window).to(device))
        elif (seen == width).all():
            masks.append(None)
        else:
            masks.append(torch.from_numpy(column >= -seen)[:, None, None].to(device))
    own = None if same else torch.from_numpy(keys).to(device)
    return Layout(
        blocks,
        own if own is None or blocks.gather is None else own.index_select(0, blocks.gather),
        torch.from_numpy(np.concatenate(before)).to(device),
        tuple(widths),
        tuple(masks),
    )
