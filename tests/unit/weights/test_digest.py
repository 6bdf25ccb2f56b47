"""A sealed manifest detects every changed byte of a tensor, and ignores bytes between tensors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.weights.digest import DigestError, seal, verify
from polyreme.weights.manifest import ManifestError, TensorSpec, plan_manifest

LAYOUT = plan_manifest([TensorSpec("a", "F32", (3,)), TensorSpec("b", "BF16", (5, 2))], {"c": "a"})


def filled() -> bytearray:
    return bytearray(np.random.default_rng(0).bytes(LAYOUT.nbytes))


def test_untouched_bytes_verify() -> None:
    data = filled()
    verify(seal(LAYOUT, memoryview(data)), memoryview(data))


@given(st.integers(0, LAYOUT.nbytes - 1), st.integers(1, 255))
def test_any_changed_byte_is_found_and_its_tensor_named(position: int, flip: int) -> None:
    data = filled()
    sealed = seal(LAYOUT, memoryview(data))
    data[position] ^= flip
    owner = next((t.name for t in LAYOUT.tensors if t.offset <= position < t.offset + t.nbytes), None)
    if owner is None:  # padding between tensors
        verify(sealed, memoryview(data))
    else:
        with pytest.raises(DigestError, match=f"1 of 3 tensors differ, first {owner}"):
            verify(sealed, memoryview(data))


def test_verifying_needs_digests_and_all_bytes() -> None:
    with pytest.raises(ManifestError, match="without digests"):
        verify(LAYOUT, memoryview(filled()))
    with pytest.raises(ManifestError, match="slot of"):
        verify(seal(LAYOUT, memoryview(filled())), memoryview(filled())[:-1])
