"""The version at which replicas are held, and its release."""

from hypothesis import given
from hypothesis import strategies as st

from polyreme.api.v1 import weights_pb2
from polyreme_trainer.weight_sync.eval_hold import EvalHold
from polyreme_trainer.weight_sync.version import Version


def version(number: int) -> Version:
    return Version(weights_pb2.Manifest(id=weights_pb2.VersionId(version=number)), slot=number % 3, generation=0)


def held(hold: EvalHold) -> int | None:
    return None if hold.version is None else hold.version.number


def test_a_version_is_held_until_it_is_evaluated_and_the_next_that_is_due_after_it() -> None:
    hold = EvalHold(lambda number: number % 2 == 0, seconds=10.0)
    hold.published(version(1), 0.0)
    assert held(hold) is None
    for number in (2, 3, 4):
        hold.published(version(number), float(number))
    assert held(hold) == 2
    hold.update(1, version(4), 5.0)
    assert held(hold) == 2
    hold.update(2, version(4), 6.0)
    assert held(hold) == 4
    hold.update(4, version(5), 7.0)
    assert held(hold) is None


def test_a_version_is_given_up_after_its_time() -> None:
    hold = EvalHold(lambda number: True, seconds=10.0)
    hold.published(version(1), 0.0)
    hold.update(-1, version(1), 9.9)
    assert held(hold) == 1
    hold.update(-1, version(1), 10.0)
    assert held(hold) is None
    hold.published(version(1), 11.0)
    assert held(hold) is None, "it has had its time"


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 4)), max_size=40), st.integers(1, 4))
def test_nothing_evaluated_or_overdue_is_held_after_a_look(script: list[tuple[int, float]], interval: int) -> None:
    hold = EvalHold(lambda number: number % interval == 0, seconds=5.0)
    newest, evaluated, now = 0, -1, 0.0
    since: dict[int, float] = {}
    for step, pause in script:
        now += pause
        if step < 2:
            newest += 1
            hold.published(version(newest), now)
        else:
            evaluated = max(evaluated, newest - step)
            hold.update(evaluated, version(newest), now)
        if (number := held(hold)) is not None:
            since.setdefault(number, now)
            assert number % interval == 0
            assert step < 2 or (number > evaluated and now < since[number] + 5.0)
