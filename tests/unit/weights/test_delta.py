"""Deltas of parts: applied, chained or compacted, they give the digests of the whole version, or are refused."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.weights import delta as deltas
from polyreme.weights.delta import DeltaError, DeltaManifest, TensorDelta, WeightDelta, compact, diff
from polyreme.weights.digest import DigestError, seal, verify
from polyreme.weights.manifest import Manifest, ManifestError, TensorSpec, plan_manifest, tensor_views
from polyreme.weights.sparse import FrameError

LAYOUT = plan_manifest(
    [TensorSpec("embed", "BF16", (400, 30)), TensorSpec("norm", "F32", (33,)), TensorSpec("none", "BF16", (0, 4)),
     TensorSpec("mlp", "BF16", (9000,)), TensorSpec("scales", "F8_E4M3", (77,))],
    {"head": "embed"}, part=1, parts=2,
)  # fmt: skip
SPECIAL = {
    "BF16": [0x8000, 0x7FC0, 0x7FC1, 0xFFFF, 0],
    "F32": [0x80000000, 0x7FC00000, 0x7FC00001, 0, 1],
    "F8_E4M3": [0x80, 0xFF, 0],
}

Version = tuple[Manifest, bytearray]


def first_version(seed: int) -> Version:
    data = bytearray(np.random.default_rng(seed).bytes(LAYOUT.nbytes))
    return seal(LAYOUT.stamped("run", 3, 0), memoryview(data)), data


def step(version: Version, rng: np.random.Generator, fraction: float) -> Version:
    """The next version: a fraction of each tensor's elements gets special bit patterns."""
    manifest, data = version[0].stamped("run", 3, version[0].version + 1), bytearray(version[1])
    for tensor in manifest.tensors:
        view = tensor_views(manifest, memoryview(data))[tensor.name]
        words = view.view(f"u{view.itemsize}").reshape(-1)
        chosen = rng.random(len(words)) < fraction
        words[chosen] = rng.choice(np.array(SPECIAL[tensor.dtype], words.dtype), chosen.sum())
    return seal(manifest, memoryview(data)), data


def between(old: Version, new: Version) -> WeightDelta | None:
    return diff(old[0], memoryview(old[1]), new[0], memoryview(new[1]))


def applied(delta: WeightDelta, base: Version) -> Version:
    shadow = bytearray(base[1])
    deltas.apply(delta.manifest, memoryview(delta.payload), memoryview(shadow))
    verify(delta.manifest.manifest, memoryview(shadow))
    return delta.manifest.manifest, shadow


@settings(max_examples=40)
@given(st.integers(0, 99), st.lists(st.sampled_from([0.0, 0.002, 0.02, 0.1]), min_size=1, max_size=3))
def test_a_chain_and_its_compaction_end_at_the_digests_of_the_whole_version(seed: int, fractions: list[float]) -> None:
    rng = np.random.default_rng(seed)
    base = version = first_version(seed)
    combined: WeightDelta | None = None
    for fraction in fractions:
        after = step(version, rng, fraction)
        delta = between(version, after)
        assert delta is not None
        assert applied(delta, version)[1] == after[1]
        combined = delta if combined is None else compact(combined, delta)
        assert combined is not None
        version = after
    assert combined is not None
    assert applied(combined, base) == version
    assert combined.manifest.base.tensors == base[0].tensors
    assert (
        DeltaManifest.from_proto(pb.DeltaManifest.FromString(combined.manifest.to_proto().SerializeToString()))
        == combined.manifest
    )


def test_unchanged_tensors_have_no_bytes_dense_ones_no_positions() -> None:
    rng, base = np.random.default_rng(0), first_version(0)
    manifest, data = base[0].stamped("run", 3, 1), bytearray(base[1])
    views = tensor_views(manifest, memoryview(data))
    views["norm"][:] = rng.normal(size=33)
    views["mlp"][5] ^= 1
    delta = between(base, (seal(manifest, memoryview(data)), data))
    assert delta is not None
    embed, norm, none, mlp, scales = delta.manifest.tensors
    assert [(t.changed, t.words, t.nbytes) for t in (embed, none, scales)] == [(0, 0, 0)] * 3
    assert (norm.changed, norm.words, mlp.changed, mlp.words) == (33, 0, 1, 1)
    assert delta.manifest.density == 34 / (12000 + 33 + 9000 + 77)


@pytest.mark.parametrize(("changed", "positions"), [(2250, True), (2251, False)])
def test_a_tensor_is_stored_whole_from_a_quarter_of_its_elements_on(changed: int, positions: bool) -> None:
    base = first_version(0)
    manifest, data = base[0].stamped("run", 3, 1), bytearray(base[1])
    tensor_views(manifest, memoryview(data))["mlp"][:changed] ^= 1
    after = seal(manifest, memoryview(data)), data
    delta = between(base, after)
    assert delta is not None
    mlp = delta.manifest.tensors[3]
    assert (mlp.changed, mlp.words > 0) == (changed if positions else 9000, positions)
    assert applied(delta, base) == after


@pytest.mark.parametrize(("rows", "is_sent"), [(185, True), (195, False)])
def test_more_than_half_of_the_bytes_is_no_delta(rows: int, is_sent: bool) -> None:
    """Random bytes do not become smaller."""
    layout = plan_manifest([TensorSpec(f"row{number}", "U8", (1000,)) for number in range(380)])
    old = bytearray(np.random.default_rng(0).bytes(layout.nbytes))
    new = bytearray(old)
    for tensor in layout.tensors[:rows]:
        new[tensor.offset : tensor.offset + 1000] = np.random.default_rng(tensor.offset + 1).bytes(1000)
    sealed = [seal(layout.stamped("run", 3, number), memoryview(data)) for number, data in enumerate((old, new))]
    delta = diff(sealed[0], memoryview(old), sealed[1], memoryview(new))
    assert (delta is not None) == is_sent


def test_a_delta_on_another_base_is_found_out() -> None:
    base, rng = first_version(0), np.random.default_rng(1)
    delta = between(base, step(base, rng, 0.1))
    assert delta is not None
    with pytest.raises(DigestError):
        applied(delta, first_version(1))


def test_threads_share_the_tensors_and_find_the_same_errors() -> None:
    base, rng = first_version(0), np.random.default_rng(1)
    after = step(base, rng, 0.1)
    delta = between(base, after)
    assert delta is not None
    with ThreadPoolExecutor(3) as pool:
        for payload, error in ((delta.payload, None), (bytes(len(delta.payload)), FrameError)):
            shadow = bytearray(base[1])
            with pytest.raises(error) if error else nullcontext():
                deltas.apply(delta.manifest, memoryview(payload), memoryview(shadow), pool.map)
                verify(after[0], memoryview(shadow), pool.map)
                assert shadow == after[1]
        shadow[0] ^= 1
        with pytest.raises(DigestError, match="embed"):
            verify(after[0], memoryview(shadow), pool.map)


def test_deltas_that_do_not_follow_each_other_are_not_compacted() -> None:
    base, rng = first_version(0), np.random.default_rng(1)
    middle = step(base, rng, 0.01)
    first, second = between(base, middle), between(middle, step(middle, rng, 0.01))
    assert first and second
    with pytest.raises(DeltaError, match="from version 2; found one from 0"):
        compact(second, first)


def test_another_layout_or_an_unsealed_manifest_has_no_delta() -> None:
    manifest, data = first_version(0)
    other = plan_manifest([TensorSpec("embed", "BF16", (40, 30))], part=1, parts=2).stamped("run", 3, 1)
    with pytest.raises(DeltaError, match="layout"):
        diff(manifest, memoryview(data), seal(other, memoryview(data)), memoryview(data))
    with pytest.raises(ManifestError, match="sealed"):
        diff(manifest, memoryview(data), manifest.stamped("run", 3, 1), memoryview(data))


def test_inconsistent_delta_manifests_are_refused() -> None:
    manifest, data = first_version(0)
    with pytest.raises(ManifestError, match="changes of its 5 tensors"):
        DeltaManifest(manifest, 3, 0, ())
    with pytest.raises(ManifestError, match="at most"):
        DeltaManifest(manifest, 3, 0, (TensorDelta(1, 1, manifest.nbytes // 2 + 1, 0), *[TensorDelta(0, 0, 0, 0)] * 4))
    delta = between((manifest, data), step((manifest, data), np.random.default_rng(0), 0.1))
    assert delta
    with pytest.raises(DeltaError, match="payload"):
        deltas.apply(delta.manifest, memoryview(delta.payload)[1:], memoryview(data))
