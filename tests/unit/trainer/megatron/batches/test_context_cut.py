"""Every token of a micro-batch is on one context rank, and the ranks have equal amounts of computation."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyreme_trainer.megatron.batches.batch import IGNORE
from polyreme_trainer.megatron.batches.context_cut import Cut, cut_sequences, piece_ends
from polyreme_trainer.megatron.batches.packing import PackedIds
from polyreme_trainer.megatron.parallel.context import ContextRanks

CPU = torch.device("cpu")
lengths_of = st.lists(st.integers(1, 30), min_size=1, max_size=12)


def cuts_of(lengths: list[int], ranks: int) -> list[Cut]:
    """The ranks' cuts of the sequences, and of one more that makes the number of tokens divisible."""
    ids = PackedIds(torch.zeros(sum(lengths), dtype=torch.int64), tuple(lengths)).aligned(ranks)
    return [cut_sequences(ids.lengths, rank, ranks, CPU) for rank in range(ranks)]


@given(lengths_of, st.integers(2, 5))
def test_ranks_have_equally_many_tokens_and_together_each_once(lengths: list[int], ranks: int) -> None:
    cuts = cuts_of(lengths, ranks)
    assert len({len(cut.tokens) for cut in cuts}) == 1
    gathered = torch.cat([cut.tokens for cut in cuts])
    assert torch.equal(gathered[cuts[0].places], torch.arange(len(gathered)))


@given(lengths_of, st.integers(2, 5))
def test_the_keys_of_a_piece_are_its_sequence_up_to_its_end(lengths: list[int], ranks: int) -> None:
    cuts = cuts_of(lengths, ranks)
    gathered = torch.cat([cut.tokens for cut in cuts])
    for cut in cuts:
        queries = cut.tokens.split([sum(half.lengths) for half in cut.halves])
        for half, mine in zip(cut.halves, queries, strict=True):
            pieces, prefixes = mine.split(half.lengths), gathered[half.keys].split(half.key_lengths)
            for piece, prefix in zip(pieces, prefixes, strict=True):
                first, last = int(prefix[0]), int(piece[-1])
                assert torch.equal(piece, torch.arange(last + 1 - len(piece), last + 1))
                assert torch.equal(prefix, torch.arange(first, last + 1))
                assert first in np.cumsum([0, *lengths])


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_attend_equally_much(ranks: int) -> None:
    lengths = np.array([640, 97, 333])
    ends, sizes = piece_ends(lengths, ranks)[1:], np.diff(piece_ends(lengths, ranks), axis=0)
    scores = (sizes * ends - sizes * (sizes - 1) // 2).sum(axis=1)  # of each query up to its own position
    of_ranks = scores[:ranks] + scores[::-1][:ranks]
    assert of_ranks.max() <= 1.03 * of_ranks.min()


def test_targets_follow_their_tokens_and_padding_has_none() -> None:
    ids = PackedIds(torch.arange(7), (4, 3))
    parts = [ContextRanks(rank, 2, 3).take(ids, torch.arange(7), IGNORE).tolist() for rank in (0, 1)]
    assert [len(part) for part in parts] == [6, 6]
    assert sorted(parts[0] + parts[1]) == [IGNORE] * 5 + list(range(7))
    assert ContextRanks(0, 1, 3).take(ids, ids.ids, IGNORE) is ids.ids
