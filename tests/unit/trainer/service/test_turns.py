"""Tenants take turns, among them their models, and the requests of each model stay in order."""

from hypothesis import given
from hypothesis import strategies as st

from polyreme.experience.requests import TENANT_DIGITS, LogPlace, in_lane, in_turns, queue_state, tenant_in
from polyreme_trainer.service.turns import TURN, LaneTurn, next_request


def play(waiting: list[LogPlace], steps: int) -> list[LogPlace]:
    """The requests in the order of their execution."""
    turn, done = LaneTurn(), list[LogPlace]()
    while len(done) < steps and (chosen := next_request(waiting, turn)) is not None:
        place, turn = chosen
        waiting.remove(place)
        done.append(place)
    return done


def test_a_model_with_much_work_does_not_hold_up_another() -> None:
    waiting = [in_lane("a", seq) for seq in range(100)] + [in_lane("b", 0)]
    done = play(waiting, 101)
    assert done.index(in_lane("b", 0)) == TURN
    assert [place.seq for place in done if place.lane == "a"] == list(range(100))


def test_a_turn_ends_with_the_models_last_request() -> None:
    assert [place.lane for place in play([in_lane("a", 0), in_lane("b", 0), in_lane("b", 1), in_lane("a", 1)], 4)] == list("aabb")


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=120))
def test_every_waiting_model_has_a_turn_between_two_of_another(lanes: list[str]) -> None:
    waiting = [in_lane(lane, lanes[:number].count(lane)) for number, lane in enumerate(lanes)]
    done = play(list(waiting), len(waiting))
    assert sorted(done, key=str) == sorted(waiting, key=str)
    for lane in set(lanes):
        mine = [place.seq for place in done if place.lane == lane]
        assert mine == sorted(mine)
        left = len(mine)
        runs = "".join(place.lane for place in done)
        assert runs.find(lane) <= TURN * (len(set(lanes)) - 1), (left, runs)


ALICE, BOB = "a" * TENANT_DIGITS, "b" * TENANT_DIGITS


def test_a_tenant_with_many_models_does_not_hold_up_another() -> None:
    waiting = [in_lane(f"{ALICE}{number}", seq) for number in range(9) for seq in range(TURN)]
    waiting += [in_lane(f"{BOB}0", seq) for seq in range(3 * TURN)]
    turns = "".join(tenant_in(place.lane)[0] for place in play(waiting, len(waiting))[::TURN])
    assert turns == "abababaaaaaa"


@given(st.lists(st.tuples(st.sampled_from([ALICE, BOB, "c" * TENANT_DIGITS]), st.sampled_from("xyz")), min_size=1, max_size=120))
def test_every_waiting_tenant_has_a_turn_between_two_of_another(lanes: list[tuple[str, str]]) -> None:
    names = [tenant + model for tenant, model in lanes]
    waiting = [in_lane(name, names[:number].count(name)) for number, name in enumerate(names)]
    done = play(list(waiting), len(waiting))
    for tenant in {tenant for tenant, _ in lanes}:
        first = next(number for number, place in enumerate(done) if tenant_in(place.lane) == tenant)
        assert first <= 2 * TURN, "all three wait from the beginning"


def test_sampling_is_fair_to_tenants() -> None:
    waiting = [LogPlace(f"{ALICE}:{number}", "sampler") for number in range(3)] + [LogPlace(f"{BOB}:0", "sampler")]
    assert [place.id for place in in_turns(waiting)] == [f"{ALICE}:0", f"{BOB}:0", f"{ALICE}:1", f"{ALICE}:2"]


def test_what_a_model_waits_for_is_sampled_first() -> None:
    """In its tenant's turn."""
    waiting = [LogPlace(id, "sampler") for id in (f"{BOB}:0", f"{BOB}:1", f"{ALICE}:0", f"{ALICE}:1", f"{ALICE}:0:load")]
    assert [waiting.index(place) for place in in_turns(waiting)] == [4, 0, 1, 2, 3]


def test_a_request_is_active_while_its_tenant_has_its_turn() -> None:
    assert queue_state(f"{ALICE}:1", []) == "active"
    assert queue_state(f"{ALICE}:1", [f"{BOB}:0", f"{ALICE}:0"]) == "active"
    assert queue_state(f"{ALICE}:1", [f"{BOB}:0"]) == "paused_capacity"
