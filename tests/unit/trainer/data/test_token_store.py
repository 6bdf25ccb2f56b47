"""Token sequences on disk."""

import resource
import tempfile

import numpy as np
import pytest

from polyreme.errors import DataError
from polyreme_trainer.data.token_store import TokenStore


def test_sequences_are_read_back_in_any_order() -> None:
    stored = [np.arange(n, dtype=np.int32) for n in (3, 0, 5)]
    store = TokenStore()
    for each in stored:
        store.append(each, (each % 2).astype(np.uint8))
    ids, mask = store.close()
    assert len(ids) == len(mask) == 3
    for place in (2, 0, 1, -1):
        assert ids[place].tolist() == stored[place].tolist() and mask[place].tolist() == (stored[place] % 2).tolist()
    assert [part.tolist() for part in ids[1:]] == [part.tolist() for part in stored[1:]]
    assert not ids[0].flags.writeable
    for place in (3, -4):
        with pytest.raises(IndexError):
            ids[place]


def test_a_store_may_be_empty() -> None:
    ids, mask = TokenStore().close()
    assert list(ids) == list(mask) == []


@pytest.mark.parametrize("tokens", [1, 1 << 16], ids=["when it is closed", "when a sequence is added"])
def test_a_full_disk_is_an_error_of_its_own(tokens: int) -> None:
    """A process that may write no file meets what it meets on a full disk. A few tokens stay in the file's buffer until it is closed."""
    store = TokenStore()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(DataError) as error:
            store.append(np.arange(tokens, dtype=np.int32), np.zeros(tokens, dtype=np.uint8))
            store.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tempfile.gettempdir() in error.value.expected and "TMPDIR" in error.value.do
