"""Chunks on the wire are valid StageStreamRequest messages, and messages encoded by protobuf are accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.weights.wire import LONGEST_CHUNK_BYTES, WireError, decode_chunk, decode_manifest, encode_chunk, encode_manifest

offsets = st.one_of(st.integers(0, 300), st.integers(0, (1 << 64) - 1))
chunks = st.one_of(st.binary(min_size=1, max_size=20), st.integers(1, 70_000).map(bytes))


def decoded(message: bytes) -> tuple[int, bytes]:
    offset, data = decode_chunk(message)
    return offset, bytes(data)


@given(offsets, chunks)
def test_ours_is_what_protobuf_reads_and_writes(offset: int, data: bytes) -> None:
    ours = encode_chunk(offset, memoryview(data))
    assert ours == pb.StageStreamRequest(offset=offset, data=data).SerializeToString()
    assert decoded(ours) == (offset, data)


@given(offsets, chunks)
def test_another_order_of_fields_is_read_too(offset: int, data: bytes) -> None:
    head = pb.StageStreamRequest(offset=offset).SerializeToString()
    body = pb.StageStreamRequest(data=data).SerializeToString()
    assert decoded(body + head) == (offset, data)
    assert decoded(head + head + body) == (offset, data)


@given(st.binary(max_size=40))
def test_any_bytes_are_read_as_protobuf_reads_them_or_refused(message: bytes) -> None:
    try:
        offset, data = decoded(message)
    except WireError:
        return
    read = pb.StageStreamRequest.FromString(message)
    assert (read.offset, read.data) == (offset, data)


def test_an_invalid_chunk_is_refused() -> None:
    manifest = encode_manifest(pb.Manifest(parts=1))
    for message, text in [
        (manifest, "found a manifest"),
        (pb.StageStreamRequest(data=b"x").SerializeToString(), "no offset"),
        (pb.StageStreamRequest(offset=0).SerializeToString(), "found 0"),
        (encode_chunk(0, memoryview(bytes(LONGEST_CHUNK_BYTES + 1))), f"found {LONGEST_CHUNK_BYTES + 1}"),
        (encode_chunk(0, memoryview(b"abc"))[:-1], "other bytes"),
    ]:
        with pytest.raises(WireError, match=text):
            decode_chunk(message)


def test_a_stream_begins_with_its_manifest() -> None:
    manifest = pb.Manifest(id=pb.VersionId(run_id="r", term=1, version=2), part=0, parts=1, nbytes=7)
    assert decode_manifest(encode_manifest(manifest)) == manifest
    for message in (b"", encode_chunk(0, memoryview(b"x"))):
        with pytest.raises(WireError, match="manifest first"):
            decode_manifest(message)
    with pytest.raises(WireError, match="other bytes"):
        decode_manifest(b"\xff\xff")
