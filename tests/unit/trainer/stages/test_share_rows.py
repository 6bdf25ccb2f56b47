"""Every rank gets the rows that rank 0 reads, in pieces."""

from queue import SimpleQueue

import numpy as np
import pytest

from polyreme.errors import DataError
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.leader import LeaderError, Ranks
from polyreme_trainer.stages.share_rows import pieces, share_rows

LENGTHS = (3, 1, 2, 5)


class Pipe:
    """The messages of rank 0, to be received later."""

    def __init__(self) -> None:
        self.messages: SimpleQueue[tuple[int, bytes]] = SimpleQueue()

    def send(self, kind: int, payload: bytes) -> None:
        self.messages.put((kind, payload))

    def receive(self) -> tuple[int, bytes]:
        return self.messages.get_nowait()


def read() -> StageRows:
    return StageRows(
        [np.arange(n, dtype=np.int32) for n in LENGTHS],
        [np.arange(n, dtype=np.uint8) % 2 for n in LENGTHS],
        2,
        {"margin": np.array([0.5, 1.5], np.float32), "tie": np.array([0, 1], np.float32)},
    )


@pytest.mark.parametrize("limit", [1, 4, 100])
def test_every_rank_has_the_rows_of_rank_0(limit: int) -> None:
    pipe = Pipe()
    leader, other = Ranks(0, pipe), Ranks(1, pipe)
    own = share_rows(leader, read, limit)
    found = share_rows(other, read, limit)
    leader.close()
    assert pipe.messages.empty()
    for rows in (own, found):
        assert rows.width == 2 and len(rows) == 2
        assert [ids.tolist() for ids in rows.ids] == [ids.tolist() for ids in read().ids]
        assert [mask.tolist() for mask in rows.loss_mask] == [mask.tolist() for mask in read().loss_mask]
        assert {name: values.tolist() for name, values in rows.columns.items()} == {"margin": [0.5, 1.5], "tie": [0.0, 1.0]}
    assert [ids.tolist() for ids in found.take(np.array([1])).ids] == [[0, 1], [0, 1, 2, 3, 4]]


def test_an_error_of_the_data_reaches_every_rank() -> None:
    def fail() -> StageRows:
        raise DataError("rows", "none", "Fix the file.")

    pipe = Pipe()
    leader = Ranks(0, pipe)
    with pytest.raises(DataError):
        share_rows(leader, fail)
    with pytest.raises(LeaderError):
        share_rows(Ranks(1, pipe), fail)
    leader.close()


@pytest.mark.parametrize(
    ("lengths", "limit", "ranges"),
    [([], 4, []), ([9], 4, [(0, 1)]), ([1, 1, 3, 9, 1], 4, [(0, 2), (2, 3), (3, 4), (4, 5)]), ([2, 2, 2], 6, [(0, 3)])],
)
def test_a_piece_has_at_most_so_many_tokens_or_one_sequence(
    lengths: list[int], limit: int, ranges: list[tuple[int, int]]
) -> None:
    assert list(pieces(np.array(lengths, dtype=np.int64), limit)) == ranges
