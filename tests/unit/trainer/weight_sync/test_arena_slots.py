"""No slot is reused while it may be read, and dropping the blocking replicas always frees one."""

from hypothesis import given
from hypothesis import strategies as st

from polyreme_trainer.weight_sync.arena_slots import ArenaSlots

steps = st.lists(
    st.tuples(st.sampled_from(["write", "keep", "try", "commit", "leave"]), st.sampled_from(["a", "b", "c", "d"])), max_size=60
)


@given(st.integers(3, 5), steps)
def test_slots_against_a_model_of_who_reads_what(count: int, script: list[tuple[str, str]]) -> None:
    slots = ArenaSlots(count)
    newest: int | None = None
    serving: dict[str, int] = {}
    moving: dict[str, int] = {}
    for step, replica in script:
        if step == "write":
            slot = slots.free()
            if slot is None:
                in_the_way = slots.blocking_replicas()
                assert in_the_way
                for name in in_the_way:
                    slots.drop(name)
                    serving.pop(name, None)
                    moving.pop(name, None)
                slot = slots.free()
            assert slot is not None
            assert slot not in (newest, slots.pinned)
            assert slot not in {*serving.values(), *moving.values()}
            slots.newest = newest = slot
        elif step == "keep":
            slots.pinned = None if slots.pinned is not None else newest
        elif step == "try" and newest is not None:
            target = newest if slots.pinned is None else slots.pinned
            slots.loading(replica, target)
            moving[replica] = target
        elif step == "commit" and replica in moving:
            slots.serving(replica, moving[replica])
            serving[replica] = moving.pop(replica)
        elif step == "leave":
            slots.drop(replica)
            serving.pop(replica, None)
            moving.pop(replica, None)
        for slot in range(count):
            assert set(slots.readers(slot)) == {r for r, s in (*serving.items(), *moving.items()) if s == slot}


def test_the_streams_that_began_last_make_room() -> None:
    slots = ArenaSlots(3, newest=0)
    slots.streaming("a", 1)
    assert slots.free() == 2
    slots.streaming("b", 2)
    slots.streaming("c", 2)
    assert slots.free() is None
    assert sorted(slots.interruptible()) == ["b", "c"]
    slots.serving("d", 2)
    assert slots.interruptible() == ["a"], "no stream's end frees a slot that a replica serves from"
    slots.drop("a")
    assert slots.free() == 1
    assert slots.interruptible() == []


def test_the_fewest_replicas_are_in_the_way() -> None:
    slots = ArenaSlots(3, newest=0)
    slots.serving("a", 1)
    slots.serving("b", 1)
    slots.serving("c", 2)
    slots.loading("c", 0)
    assert slots.free() is None
    assert slots.blocking_replicas() == ["c"]


def test_one_slow_replica_leaves_a_slot_to_write() -> None:
    """Three slots: the one it serves, the one it moves to, and one for training."""
    slots = ArenaSlots(3, newest=0)
    slots.serving("a", 0)
    slots.newest = 1
    slots.loading("a", 1)
    assert slots.free() == 2
