"""A part assembled from chunks: any split gives the same bytes, and every wrong byte is detected."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.weights.assembly import Assembly, RangeError
from polyreme.weights.digest import DigestError, seal
from polyreme.weights.manifest import Manifest, ManifestError, TensorSpec, plan_manifest

Part = tuple[Manifest, bytes]


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """A sealed part and its bytes: several tensors, including empty ones and an alias, with noise between them."""
    shapes = draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7)), min_size=1, max_size=8))
    dtypes = [draw(st.sampled_from(["F32", "BF16", "U8"])) for _ in shapes]
    specs = [TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(zip(dtypes, shapes, strict=True))]
    layout = plan_manifest(specs, {"alias": "t0"})
    data = np.random.default_rng(draw(st.integers(0, 99))).bytes(layout.nbytes)
    return seal(layout.stamped("run", 1, 1), memoryview(data)), data


def feed(assembly: Assembly, data: bytes, cuts: list[int]) -> None:
    edges = [assembly.position, *sorted(cut for cut in cuts if assembly.position < cut < len(data)), len(data)]
    for start, stop in itertools.pairwise(edges):
        assert not assembly.complete
        assembly.add(start, memoryview(data)[start:stop])
        assert assembly.position == stop


@given(parts(), st.lists(st.integers(0, 4000), unique=True))
def test_any_cut_gives_the_same_bytes(part: Part, cuts: list[int]) -> None:
    manifest, data = part
    buffer = bytearray(manifest.nbytes + 5)
    assembly = Assembly(manifest, memoryview(buffer))
    if data:
        feed(assembly, data, cuts)
    assert assembly.complete
    assert buffer[: len(data)] == data


@given(parts(), st.lists(st.integers(0, 4000), unique=True), st.data())
def test_a_wrong_byte_in_a_tensor_never_completes(part: Part, cuts: list[int], drawn: st.DataObject) -> None:
    manifest, data = part
    bytes_of = [i for t in manifest.tensors if not t.alias_of for i in range(t.offset, t.offset + t.nbytes)]
    if not bytes_of:
        return
    wrong = bytearray(data)
    wrong[drawn.draw(st.sampled_from(bytes_of))] ^= 1 << drawn.draw(st.integers(0, 7))
    assembly = Assembly(manifest, memoryview(bytearray(manifest.nbytes)))
    with pytest.raises(DigestError, match="differs"):
        feed(assembly, bytes(wrong), cuts)
    assert assembly.broken
    assert not assembly.complete
    with pytest.raises(RangeError):
        assembly.add(assembly.position, memoryview(b"x"))


def small() -> tuple[Manifest, bytes]:
    layout = plan_manifest([TensorSpec("a", "U8", (10,)), TensorSpec("b", "U8", (6,))])
    data = bytes(range(layout.nbytes))
    return seal(layout.stamped("run", 1, 1), memoryview(data)), data


@pytest.mark.parametrize(("offset", "size"), [(0, 5), (6, 5), (5, 66), (1 << 60, 1)])
def test_bytes_out_of_order_or_beyond_the_part_change_nothing(offset: int, size: int) -> None:
    manifest, data = small()
    assembly = Assembly(manifest, memoryview(bytearray(100)))
    assembly.add(0, memoryview(data)[:5])
    with pytest.raises(RangeError, match=f"found {size} from {offset} on"):
        assembly.add(offset, memoryview(bytes(size)))
    feed(assembly, data, [])
    assert assembly.complete


def test_a_manifest_without_digests_or_without_room_is_refused() -> None:
    manifest, _ = small()
    with pytest.raises(ManifestError, match="without digests"):
        Assembly(manifest.stamped("run", 1, 2), memoryview(bytearray(100)))
    with pytest.raises(ManifestError, match="70 bytes; found 69"):
        Assembly(manifest, memoryview(bytearray(69)))
