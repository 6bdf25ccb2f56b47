"""Models take turns, and the requests of each stay in order."""

from hypothesis import given
from hypothesis import strategies as st

from polyreme.experience.requests import LogPlace, in_lane
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
