"""The parts of a version are taken when they are complete and fit the model."""

import pytest

from polyreme.weights.manifest import ArenaSource, TensorSpec, plan_manifest
from polyreme_rollout.weights.staged_parts import Refusal, StagedParts, VersionId

NAMES = frozenset({"a", "b"})


def source(part: int, parts: int, names: list[str], version: int = 1, term: int = 1) -> ArenaSource:
    layout = plan_manifest([TensorSpec(name, "F32", (1,)) for name in names], part=part, parts=parts)
    return ArenaSource("/none", b"", 0, 2, layout.stamped("run", term, version))


def test_a_version_of_parts_is_taken_when_all_are_there() -> None:
    staged = StagedParts(NAMES)
    staged.put(source(1, 2, ["b"]))
    with pytest.raises(Refusal, match=r"parts \[0\]") as refused:
        staged.take(VersionId(1, 1))
    assert refused.value.code == "FAILED_PRECONDITION"
    staged.put(source(0, 2, ["a"]))
    assert [part.manifest.part for part in staged.take(VersionId(1, 1))] == [0, 1]
    staged.put(source(0, 2, ["a"], version=2))
    with pytest.raises(Refusal, match="version 2 of term 1") as refused:
        staged.take(VersionId(1, 1))
    assert refused.value.code == "FAILED_PRECONDITION"


@pytest.mark.parametrize("change", [{"version": 2}, {"term": 2}, {"parts": 3}], ids=str)
@pytest.mark.parametrize("newer", [0, 1])
def test_parts_of_two_versions_never_mix(change: dict[str, int], newer: int) -> None:
    """The newer version may come from a restarted learner (its term), or from one on other machines (the number of parts)."""
    staged, names = StagedParts(NAMES), (["a"], ["b"])
    first = {"parts": 2, "version": 1, "term": 1}
    second = first | change
    for part in (0, 1):
        staged.put(source(part, names=names[part], **first))
    staged.put(source(newer, names=names[newer], **second))
    for each in (first, second):
        with pytest.raises(Refusal) as refused:
            staged.take(VersionId(each["term"], each["version"]))
        assert refused.value.code == "FAILED_PRECONDITION"


@pytest.mark.parametrize(("names", "text"), [(["a"], "missing b, unknown none"), (["a", "b", "d"], "missing none, unknown d")])
def test_names_must_cover_the_model(names: list[str], text: str) -> None:
    staged = StagedParts(NAMES)
    staged.put(source(0, 1, names))
    with pytest.raises(Refusal, match=text) as refused:
        staged.take(VersionId(1, 1))
    assert refused.value.code == "FAILED_PRECONDITION"
