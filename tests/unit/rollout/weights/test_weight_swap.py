"""The weight swapper compared with a model: in any order of stages, damages, failures and stale calls it serves a whole version or
nothing."""

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest, tensor_views
from polyreme_rollout.weights.staged_parts import Refusal, VersionId
from polyreme_rollout.weights.swap_state import SwapPhase, SwapState
from polyreme_rollout.weights.weight_swap import FAILURES_TO_QUARANTINE, WeightSwapper
from support.receiver import MemoryEngine
from support.waiting import until

LAYOUT = plan_manifest([TensorSpec("a", "F32", (3,)), TensorSpec("b", "F32", (2, 2))], {"c": "a"})
NAMES = frozenset({"a", "b"})


def write(arena: Arena, slot: int, term: int, version: int, value: float, layout: Manifest = LAYOUT) -> tuple[Manifest, int]:
    """Writes a version whose numbers are all `value`. Returns its manifest and generation."""
    arena.begin(slot)
    for view in tensor_views(layout, arena.slot_view(slot)).values():
        view[...] = value
    generation = arena.complete(slot, version, term)
    return seal(layout.stamped("run", term, version), arena.slot_view(slot)), generation


Slot = tuple[int, int]
"""A part in the arena: slot number and generation."""
OWN: Slot = (-1, -1)
"""A part in memory that only the replica writes."""


AHEAD = st.sampled_from([0] * 10 + [1, -1])
VERSIONS = st.sampled_from([None] * 6 + [0, 1, 2])
OTHER = st.sampled_from([False] * 9 + [True])


def sent(term: int, version: int, value: float) -> tuple[Manifest, bytearray]:
    """A streamed version whose numbers are all `value`."""
    data = bytearray(LAYOUT.nbytes)
    for view in tensor_views(LAYOUT, memoryview(data)).values():
        view[...] = value
    return seal(LAYOUT.stamped("run", term, version), memoryview(data)), data


class SwapMachine(RuleBasedStateMachine):
    """Model: `served` = (term, version, value) or None; `staged` likewise; failures in a row; the highest term seen."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.arena = Arena.create(f"test-{uuid.uuid4().hex[:12]}", LAYOUT.nbytes)
        self.engine = MemoryEngine(sorted(NAMES))
        self.redis_term, self.lost = 0, 0
        self.announced: list[int] = []
        self.swapper = WeightSwapper("run", self.engine, lambda: self.redis_term, self._on_swap, self._on_lost)
        self.slots: dict[int, tuple[Manifest, int, float]] = {}
        self.served: tuple[int, int, float] | None = None
        self.served_slot: Slot | None = None
        self.staged: tuple[int, int, float, Slot] | None = None
        self.salted: dict[str, float | None] = {}
        self.term = self.failures = self.numbers = 0

    def teardown(self) -> None:
        self.arena.close()
        self.loop.close()

    def _on_swap(self, version: int, sampled: Any) -> None:
        assert self.engine.paused, "called while sampling continues"
        self.announced.append(version)

    def _on_lost(self) -> None:
        self.lost += 1

    def attempt(self, work: Any) -> str:
        """Returns OK, or the code of the refusal."""
        try:
            self.loop.run_until_complete(work)
        except Refusal as refusal:
            return refusal.code
        return "OK"

    def gate(self, term: int) -> str | None:
        """The model's check at the start of every call."""
        self.term = max(self.term, self.redis_term)
        if term < self.term:
            return "ABORTED"
        if self.failures >= FAILURES_TO_QUARANTINE:
            return "FAILED_PRECONDITION"
        self.term = term
        return None

    @initialize()
    def start(self) -> None:
        assert self.swapper.version is None

    def identity(self, ahead: int, version: int | None) -> tuple[int, int]:
        """An id with a term `ahead` of the newest one, and a version, by default the next one."""
        term = max(1, self.term + ahead, self.redis_term + ahead)
        following = self.served[1] + 1 if self.served and self.served[0] == term else 0
        return term, following if version is None else version

    @rule(slot=st.integers(0, 2), ahead=AHEAD, version=VERSIONS)
    def learner_writes(self, slot: int, ahead: int, version: int | None) -> None:
        self.numbers += 1
        value, (term, version) = float(self.numbers), self.identity(ahead, version)
        self.slots[slot] = (*write(self.arena, slot, term, version, value), value)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def stage(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        manifest, generation, value = self.slots[slot]
        expected = self.gate(manifest.term) or "OK"
        assert self.attempt(self.swapper.staging.stage(manifest, str(self.arena.path), slot, generation)) == expected
        if expected == "OK":
            self.staged = (manifest.term, manifest.version, value, (slot, generation))

    @rule(ahead=AHEAD, version=VERSIONS, chunk=st.integers(1, 200), fate=st.sampled_from(["", "", "", "cut", "wrong"]))
    def stream(self, ahead: int, version: int | None, chunk: int, fate: str) -> None:
        """Streams a separate version into the replica's own memory: complete, truncated, or with a wrong byte."""
        self.numbers += 1
        term, version = self.identity(ahead, version)
        manifest, bytes_ = sent(term, version, float(self.numbers))
        if fate == "wrong":
            bytes_[-1] ^= 1
        expected = self.gate(term) or {"": "OK", "cut": "INVALID_ARGUMENT", "wrong": "DATA_LOSS"}[fate]
        assert self.attempt(self.receive(manifest, bytes_[: -1 if fate == "cut" else None], chunk)) == expected
        if expected in ("ABORTED", "FAILED_PRECONDITION"):
            return
        if self.staged and self.staged[3] is OWN:
            self.staged = None  # its memory was reused
        if expected == "OK":
            self.staged = (term, version, float(self.numbers), OWN)

    async def receive(self, manifest: Manifest, data: bytearray, chunk: int) -> None:
        async with self.swapper.staging.receive(manifest) as incoming:
            assert incoming.position == 0
            for offset in range(0, len(data), chunk):
                await incoming.add(offset, memoryview(data)[offset : offset + chunk])

    def intact(self, slot: "Slot | None") -> bool:
        return slot is OWN or (slot is not None and self.arena.generation(slot[0]) == slot[1])

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), damage=st.sampled_from(["bytes", "generation", "path"]))
    def stage_damaged(self, data: st.DataObject, damage: str) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        manifest, generation, _ = self.slots[slot]
        path = str(self.arena.path)
        expected = self.gate(manifest.term) or ("NOT_FOUND" if damage == "path" else "DATA_LOSS")
        first = self.arena.slot_view(slot)
        kept = first[0]
        if damage == "bytes":
            first[0] ^= 1
        outcome = self.attempt(
            self.swapper.staging.stage(manifest, path + "x" * (damage == "path"), slot, generation + 2 * (damage == "generation"))
        )
        first[0] = kept
        assert outcome == expected

    @precondition(lambda self: self.staged or self.numbers % 5 == 0)
    @rule(ahead=AHEAD, version=VERSIONS, other=OTHER, broken=st.sampled_from([0, 0, 0, 1, 2]))
    def commit(self, ahead: int, version: int | None, other: bool, broken: int) -> None:
        """`broken`: number of following loads that fail halfway. `other`: commits a version that may not be staged."""
        wanted = self.staged[:2] if self.staged and not other else self.identity(ahead, version)
        self.engine.broken_loads = broken
        expected = self.expect_commit(*wanted, broken)
        assert self.attempt(self.swapper.commit("run", VersionId(*wanted))) == expected
        self.engine.broken_loads = 0

    def expect_commit(self, term: int, version: int, broken: int) -> str:
        if refused := self.gate(term):
            return refused
        if self.served and self.served[:2] == (term, version):
            return "OK"
        if self.served and self.served[0] == term and self.served[1] > version:
            return "FAILED_PRECONDITION"
        if not self.staged or self.staged[:2] != (term, version):
            return "FAILED_PRECONDITION"
        *_, value, slot = self.staged
        self.staged = None
        if broken == 0 and self.intact(slot):
            self.served, self.served_slot, self.failures = (term, version, value), slot, 0
            return "OK"
        self.failures += 1
        broken -= self.intact(slot)  # a load that never began does not count as broken
        if broken > 0 or not self.intact(self.served_slot):
            self.served = self.served_slot = None
        return "INTERNAL"

    @rule(comes=OTHER)
    def another_learner_takes_over(self, comes: bool) -> None:
        self.redis_term += comes

    @invariant()
    def what_is_served_is_whole(self) -> None:
        served = self.swapper.served
        assert ((served.id.term, served.id.version) if served else None) == (self.served[:2] if self.served else None)
        assert self.swapper.quarantined == (self.failures >= FAILURES_TO_QUARANTINE)
        assert self.swapper.state.steady
        if self.served:
            assert not self.engine.paused
            assert {float(x) for view in self.engine.weights.values() for x in view.ravel()} == {self.served[2]}
            assert self.announced[-1] == self.served[1]

    @invariant()
    def no_two_weights_share_cached_prefixes(self) -> None:
        salt = self.loop.run_until_complete(self.swapper.steady_salt())
        value = self.served[2] if self.served else None
        assert self.salted.setdefault(salt, value) == value


SwapMachine.TestCase.settings = settings(stateful_step_count=40)
TestSwaps = SwapMachine.TestCase


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(f"test-{uuid.uuid4().hex[:12]}", LAYOUT.nbytes)
    yield arena
    arena.close()


async def test_a_slot_written_anew_after_staging_is_not_loaded(arena: Arena) -> None:
    engine = MemoryEngine(sorted(NAMES))
    swapper = WeightSwapper("run", engine, lambda: 0, lambda *_: None, lambda: None)
    manifest, generation = write(arena, 0, 1, 1, 1.0)
    await swapper.staging.stage(manifest, str(arena.path), 0, generation)
    write(arena, 0, 1, 2, 2.0)
    with pytest.raises(Refusal, match="nothing is served") as refused:
        await swapper.commit("run", VersionId(1, 1))
    assert refused.value.code == "INTERNAL"


def test_only_the_drawn_transitions_are_possible() -> None:
    empty, serving, paused, loading, checking = SwapState
    possible = {
        empty: {loading, paused},
        serving: {loading, paused},
        paused: {loading, serving, empty},
        loading: {loading, checking, empty},
        checking: {serving, empty, loading},
    }
    shortest = {
        empty: [],
        serving: [loading, checking, serving],
        paused: [paused],
        loading: [loading],
        checking: [loading, checking],
    }
    for state, path in shortest.items():
        for following in SwapState:
            phase = SwapPhase()
            for before in path:
                phase.enter(before)
            if following in possible[state]:
                phase.enter(following)
                assert phase.state is following
            else:
                with pytest.raises(RuntimeError, match=f"after {state.name}; found {following.name}"):
                    phase.enter(following)
                assert phase.state is state


async def test_a_swap_ends_although_its_caller_is_gone(arena: Arena) -> None:
    engine = MemoryEngine(sorted(NAMES))
    swapper = WeightSwapper("run", engine, lambda: 0, lambda *_: None, lambda: None)
    manifest, generation = write(arena, 0, 1, 1, 1.0)
    await swapper.staging.stage(manifest, str(arena.path), 0, generation)
    engine.may_load.clear()
    call = asyncio.ensure_future(swapper.commit("run", VersionId(1, 1)))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not swapper.state.steady
    salt = asyncio.ensure_future(swapper.steady_salt())
    await asyncio.sleep(0)
    assert not salt.done(), "what is submitted now is computed with the new weights"
    engine.may_load.set()
    assert (await salt).startswith("1.1.")
    assert swapper.version == 1
    assert not engine.paused


@pytest.fixture
async def asleep(arena: Arena) -> tuple[WeightSwapper, MemoryEngine, list[str]]:
    """A replica that served version 1 and whose engine has slept without its weights; also returns what was lost."""
    engine, lost = MemoryEngine(sorted(NAMES)), list[str]()
    swapper = WeightSwapper("run", engine, lambda: 0, lambda *_: None, lambda: lost.append("lost"))
    await bring(swapper, arena, 1)
    async with swapper.paused_for_devices():
        commit = asyncio.ensure_future(bring(swapper, arena, 2))
        await engine.sleep()
        await asyncio.sleep(0)
        assert not commit.done() and engine.paused
        commit.cancel()
    return swapper, engine, lost


async def bring(swapper: WeightSwapper, arena: Arena, version: int) -> None:
    manifest, generation = write(arena, version % 3, 1, version, float(version))
    await swapper.staging.stage(manifest, str(arena.path), version % 3, generation)
    await swapper.commit("run", VersionId(1, version))


async def test_an_engine_that_dropped_its_weights_loads_them_again(asleep: tuple[WeightSwapper, MemoryEngine, list[str]]) -> None:
    swapper, engine, lost = asleep
    salt = asyncio.ensure_future(swapper.steady_salt())
    await asyncio.sleep(0)
    assert not salt.done()
    await swapper.resume_if_paused(weights=False)
    assert not engine.paused and engine.weights["a"][0] == swapper.version == 1
    assert (await salt).startswith("1.1.") and not lost


async def test_an_engine_that_kept_its_weights_goes_on(asleep: tuple[WeightSwapper, MemoryEngine, list[str]]) -> None:
    swapper, engine, _ = asleep
    before = swapper.salt
    await swapper.resume_if_paused(weights=True)
    assert not engine.paused and swapper.salt == before


async def test_a_commit_after_a_rest_continues_and_leaves_nothing_to_do(
    asleep: tuple[WeightSwapper, MemoryEngine, list[str]], arena: Arena
) -> None:
    swapper, engine, _ = asleep
    await bring(swapper, arena, 2)
    assert not engine.paused and swapper.version == 2
    engine.broken_loads = 1
    await swapper.resume_if_paused(weights=False)
    assert engine.broken_loads == 1 and swapper.version == 2


async def test_weights_that_cannot_be_loaded_again_are_served_no_more(
    asleep: tuple[WeightSwapper, MemoryEngine, list[str]], arena: Arena
) -> None:
    swapper, engine, lost = asleep
    engine.broken_loads = 1
    await swapper.resume_if_paused(weights=False)
    assert swapper.version is None and lost == ["lost"]
    assert swapper.state.steady  # calls are refused, not queued
    await bring(swapper, arena, 2)
    assert swapper.version == 2 and not engine.paused


async def test_a_commit_whose_devices_are_lost_does_not_continue_sampling(arena: Arena) -> None:
    engine = MemoryEngine(sorted(NAMES))
    usable = True
    swapper = WeightSwapper("run", engine, lambda: 0, lambda *_: None, lambda: None, lambda: usable)
    await bring(swapper, arena, 1)
    engine.may_load.clear()
    commit = asyncio.ensure_future(bring(swapper, arena, 2))
    await until(lambda: engine.paused)
    usable = False
    engine.may_load.set()
    with pytest.raises(Refusal) as refused:
        await commit
    assert refused.value.code == "FAILED_PRECONDITION"
    assert engine.paused and engine.weights["a"][0] == 2 and swapper.version == 1
    await swapper.resume_if_paused(weights=True)
    assert engine.paused and not swapper.state.steady
    with pytest.raises(Refusal):
        await bring(swapper, arena, 2)
    usable = True
    await swapper.resume_if_paused(weights=True)
    assert not engine.paused and engine.weights["a"][0] == swapper.version == 1
