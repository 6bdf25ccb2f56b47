"""The versions that are evaluated."""

from polyreme_trainer.orchestrator.evaluation.schedule import pending


def test_which_versions_are_evaluated() -> None:
    done: set[int] = set()
    for version in range(8):
        done.update(pending(version, done, lambda v: v in (3, 6, 7)))
    assert done == {0, 3, 6, 7}
    assert list(pending(6, done, lambda _: True)) == []
    assert list(pending(4, set(), lambda _: False)) == [4] and not list(pending(4, {0}, lambda _: False))
    assert list(pending(9, {0, 3}, lambda v: v % 3 == 0)) == [6, 9]
