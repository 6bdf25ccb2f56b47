"""Whose request is next: tenants take turns, and among them their models.

Invariant: pure. A model's requests run in order. Between two turns of a tenant every other waiting tenant has one, and between
two turns of a model every other waiting model of its tenant. A request that joins another model's pass costs its model no turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from polyreme.experience.requests import LogPlace, tenant_in

TURN = 16
"""Most requests of a turn, which saves moving models in and out. A turn ends earlier when the model has no further request."""


@dataclass(frozen=True)
class LaneTurn:
    """The turn of a model.

    Attributes:
        lane: the model; empty before the first turn.
        used: the requests that it has had.
        order: when each model last had a turn, the earliest first.
    """

    lane: str = ""
    used: int = 0
    order: tuple[str, ...] = ()


def next_request(waiting: Sequence[LogPlace], turn: LaneTurn) -> tuple[LogPlace, LaneTurn] | None:
    """The request to execute, and the turn with it; None when nothing waits. `waiting`: every open request, by arrival."""
    first = firsts(waiting)
    if not first:
        return None
    if turn.lane in first and (turn.used < TURN or len(first) == 1):
        return first[turn.lane], LaneTurn(turn.lane, turn.used + 1, turn.order)
    had = {lane: number for number, lane in enumerate(turn.order)}
    others = [lane for lane in first if lane != turn.lane]
    tenants = {tenant_in(name): number for name, number in had.items()}  # the newest turn of each
    lane = min(others, key=lambda name: (tenants.get(tenant_in(name), -1), had.get(name, -1)))
    return first[lane], LaneTurn(lane, 1, (*(each for each in turn.order if each != lane), lane)[-1024:])


def firsts(waiting: Sequence[LogPlace]) -> dict[str, LogPlace]:
    """The next request of each model, by the arrival of its first one."""
    first: dict[str, LogPlace] = {}
    for place in waiting:
        if place.lane not in first or place.seq < first[place.lane].seq:
            first[place.lane] = place
    return first
