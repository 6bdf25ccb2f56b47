"""Layouts are consistent by construction, survive encoding and decoding, and their views alias the buffer."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.weights.digest import seal
from polyreme.weights.manifest import ALIGNMENT, NUMPY_DTYPES, Manifest, ManifestError, TensorSpec, plan_manifest, tensor_views

shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
spec_lists = st.lists(
    st.builds(TensorSpec, st.text(min_size=1, max_size=8), st.sampled_from(sorted(NUMPY_DTYPES)), shapes),
    min_size=1,
    max_size=12,
    unique_by=lambda spec: spec.name,
)


@given(spec_lists)
def test_plan_places_every_tensor_aligned_and_apart(specs: list[TensorSpec]) -> None:
    manifest = plan_manifest(specs)
    end = 0
    for spec, tensor in zip(specs, manifest.tensors, strict=True):
        assert (tensor.name, tensor.dtype, tensor.shape) == (spec.name, spec.dtype, spec.shape)
        assert tensor.offset % ALIGNMENT == 0
        assert end <= tensor.offset < end + ALIGNMENT
        end = tensor.offset + tensor.nbytes
    assert manifest.nbytes == end
    assert manifest == plan_manifest(specs)


@given(spec_lists, st.integers(1, 2**63), st.integers(0, 2**63))
def test_manifest_survives_the_wire(specs: list[TensorSpec], term: int, version: int) -> None:
    layout = plan_manifest(specs, {"alias \N{BULLET}": specs[0].name})
    sealed = seal(layout.stamped("run", term, version), memoryview(bytes(layout.nbytes + 1)))
    assert Manifest.from_proto(type(sealed.to_proto()).FromString(sealed.to_proto().SerializeToString())) == sealed


@given(spec_lists)
def test_views_cover_the_buffer_and_do_not_touch_each_other(specs: list[TensorSpec]) -> None:
    manifest = plan_manifest(specs)
    buffer = bytearray(manifest.nbytes + 1)
    views = tensor_views(manifest, memoryview(buffer))
    for number, view in enumerate(views.values()):
        view.view(np.uint8 if view.ndim else view.dtype)[...] = 1 if view.dtype == np.bool_ else number
    for number, spec in enumerate(specs):
        assert views[spec.name].shape == spec.shape
        assert views[spec.name].nbytes == spec.nbytes
        words = views[spec.name].view(np.uint8 if spec.shape else views[spec.name].dtype)
        assert (words == (1 if views[spec.name].dtype == np.bool_ else number)).all()


def test_alias_is_the_same_memory() -> None:
    manifest = plan_manifest([TensorSpec("embed", "F32", (5, 3))], {"head": "embed"})
    views = tensor_views(manifest, memoryview(bytearray(manifest.nbytes)))
    views["embed"][2, 1] = 7
    assert views["head"][2, 1] == 7
    assert manifest.nbytes == 60


def test_views_of_a_read_only_buffer_are_read_only() -> None:
    manifest = plan_manifest([TensorSpec("w", "BF16", (4,))])
    view = tensor_views(manifest, memoryview(bytes(8)))["w"]
    assert view.dtype == np.uint16
    assert not view.flags.writeable


def test_views_need_the_whole_part() -> None:
    manifest = plan_manifest([TensorSpec("w", "F32", (4,))])
    with pytest.raises(ManifestError, match="16 bytes; found 15"):
        tensor_views(manifest, memoryview(bytes(15)))


@pytest.mark.parametrize(
    ("specs", "aliases", "text"),
    [
        ([TensorSpec("w", "F32", (1,)), TensorSpec("w", "F32", (1,))], {}, "twice"),
        ([TensorSpec("w", "F31", (1,))], {}, "found 'F31'"),
        ([TensorSpec("w", "F32", (1,))], {"v": "u"}, "tensor u"),
        ([TensorSpec("w", "F32", (1,))], {"v": "w", "u": "v"}, "tensor v"),
        ([TensorSpec("w", "F32", (1,))], {"w": "w"}, "alias w"),
    ],
)
def test_plan_refuses_contradictions(specs: list[TensorSpec], aliases: dict[str, str], text: str) -> None:
    with pytest.raises(ManifestError, match=text):
        plan_manifest(specs, aliases)


@pytest.mark.parametrize(
    ("tensor", "change"),
    [
        (0, {"offset": 64}),
        (0, {"offset": 1}),
        (0, {"nbytes": 4}),
        (0, {"shape": (3,)}),
        (0, {"dtype": "BF16"}),
        (0, {"name": "b"}),
        (1, {"offset": 2**40}),
        (2, {"alias_of": "nobody"}),
        (2, {"shape": (3,)}),
    ],
)
def test_a_contradictory_message_is_refused(tensor: int, change: dict[str, Any]) -> None:
    layout = plan_manifest([TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (2,))], {"c": "a"})
    tensors = list(layout.tensors)
    tensors[tensor] = dataclasses.replace(tensors[tensor], **change)
    with pytest.raises(ManifestError):
        dataclasses.replace(layout, tensors=tuple(tensors))


def test_an_unsealed_manifest_does_not_travel() -> None:
    with pytest.raises(ManifestError, match="digests"):
        plan_manifest([TensorSpec("a", "F32", (2,))]).to_proto()


def test_stamping_forgets_the_digests_of_the_version_before() -> None:
    layout = plan_manifest([TensorSpec("a", "F32", (2,))], {"b": "a"})
    sealed = seal(layout, memoryview(bytes(8)))
    assert sealed.sealed
    again = sealed.stamped("run", 2, 3)
    assert not again.sealed
    assert (again.run_id, again.term, again.version) == ("run", 2, 3)
