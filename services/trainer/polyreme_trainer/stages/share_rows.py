"""Distributes the rows that rank 0 reads to every rank.

Invariant: a rank holds a piece of the rows in memory at a time; each rank keeps the rows in files. This module imports no torch.
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.token_store import TokenStore
from polyreme_trainer.learner.leader import Ranks, join, split

PIECE_TOKENS = 1 << 24
"""Maximum number of tokens in one message; a longer sequence has its own message."""


def share_rows(ranks: Ranks, read: Callable[[], StageRows], piece_tokens: int = PIECE_TOKENS) -> StageRows:
    """Returns on every rank the rows that `read` returns on rank 0. Only rank 0's result counts the omitted rows. Collective.

    They are sent in pieces of at most `piece_tokens` tokens, or of one row.

    Raises:
        On rank 0, the error of `read`; on the others, LeaderError, or DataError when their disk is full.
    """
    own: list[StageRows] = []

    async def head() -> bytes:
        own.append(await asyncio.to_thread(read))
        return _head(own[0])

    async def piece(first: int, end: int) -> bytes:
        ids, mask = own[0].ids[first:end], own[0].loss_mask[first:end]
        return join([np.concatenate(ids).tobytes(), np.concatenate(mask).tobytes()])

    width, packed_lengths, *columns = split(ranks.broadcast_from_leader(head))
    lengths, store = np.frombuffer(packed_lengths, np.int64), TokenStore()
    for first, end in pieces(lengths, piece_tokens):
        ids, mask = split(ranks.broadcast_from_leader(partial(piece, first, end)))
        if not ranks.leads:
            ends = np.cumsum(lengths[first:end])[:-1]
            parts = np.split(np.frombuffer(ids, np.int32), ends), np.split(np.frombuffer(mask, np.uint8), ends)
            for sequence in zip(*parts, strict=True):
                store.append(*sequence)
    if ranks.leads:
        return own[0]
    named = zip(columns[::2], columns[1::2], strict=True)
    return StageRows(*store.close(), int(width), {name.decode(): np.frombuffer(values, np.float32) for name, values in named})


def pieces(lengths: NDArray[np.int64], limit: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of sequences, in order, each of at most `limit` tokens or of one sequence."""
    first, tokens = 0, 0
    for place, length in enumerate(lengths.tolist()):
        if place > first and tokens + length > limit:
            yield first, place
            first, tokens = place, 0
        tokens += length
    if len(lengths) > first:
        yield first, len(lengths)


def _head(rows: StageRows) -> bytes:
    lengths = np.array([len(ids) for ids in rows.ids], dtype=np.int64)
    columns = (part for name, values in rows.columns.items() for part in (name.encode(), values.tobytes()))
    return join([str(rows.width).encode(), lengths.tobytes(), *columns])
