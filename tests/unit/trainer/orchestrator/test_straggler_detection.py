"""Which replicas are left behind: by arithmetic, and in a run with a silent and with a slow one."""

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.experience.run import RunState
from polyreme_reward.server import serve
from polyreme_rollout.testing.simulated_engine import Failures, Lengths
from polyreme_trainer.orchestrator import straggler_detection
from polyreme_trainer.orchestrator.main import orchestrate
from polyreme_trainer.orchestrator.straggler_detection import Pace, stragglers
from support.simulated import ROWS, config_tree, idle_learner, make_run, simulated_replica


class Clock:
    """Replicas that bring `rate` tokens per second and sample, in chunks of 16; a rate of 0 brings nothing."""

    def __init__(self, *rates: float, sequences: int = 4) -> None:
        self.now, self.rates = 1000.0, list(rates)
        self.paces = {f"r{i}": Pace() for i in range(len(rates))}
        self._owed = [0.0] * len(rates)
        for one in self.paces.values():
            one.change(sequences, self.now)

    def run(self, seconds: float) -> dict[str, str]:
        """What was found in the meantime."""
        found: dict[str, str] = {}
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for i, one in enumerate(self.paces.values()):
                self._owed[i] += 0.5 * self.rates[i]
                while self._owed[i] >= 16:
                    self._owed[i] -= 16
                    for _ in range(one.sequences):
                        one.arrived(16, self.now)
                        one.chunk_after(16 / self.rates[i])
            found |= stragglers(self.paces, self.now)
        return found


def test_a_silent_replica_is_found_within_seconds() -> None:
    clock = Clock(100, 100, 100)
    assert clock.run(30) == {}
    clock.rates[1] = 0
    found = clock.run(4)
    assert list(found) == ["r1"] and "sent nothing for" in found["r1"]


def test_a_slow_replica_is_found() -> None:
    found = Clock(100, 15, 90).run(25)
    assert list(found) == ["r1"] and "tokens/s" in found["r1"]
    assert Clock(100, 25, 90).run(60) == {}


def test_slow_models_are_given_the_time_that_all_of_them_take() -> None:
    clock = Clock(4, 4, 4)  # a chunk every four seconds
    assert clock.run(60) == {}
    clock.rates[0] = 0
    assert clock.run(35) == {}
    assert list(clock.run(10)) == ["r0"]


def test_a_long_first_answer_and_long_swaps_are_usual_when_they_are() -> None:
    for wait in ("first", "stall"):
        clock = Clock(100, 100)
        clock.run(5)
        setattr(clock.paces["r1"], wait, 4.0)
        clock.rates[0] = 0
        assert clock.run(11) == {}
        assert list(clock.run(3)) == ["r0"]


def test_all_silent_or_one_alone_is_nobody() -> None:
    clock = Clock(100, 100, 100)
    clock.run(15)
    clock.rates = [0, 0, 0]
    assert clock.run(100) == {}
    alone = Clock(100)
    alone.run(15)
    alone.rates = [0]
    assert alone.run(100) == {}


def test_time_in_which_nobody_listened_does_not_count() -> None:
    clock = Clock(100, 100)
    clock.run(15)
    clock.now += 60
    for one in clock.paces.values():
        one.reset(clock.now)
    assert clock.run(15) == {}


@given(
    st.lists(st.floats(1, 500), min_size=1, max_size=6), st.integers(1, 8), st.floats(1, 40)
)  # fmt: skip
def test_like_among_like_is_never_left_behind(rates: list[float], sequences: int, seconds: float) -> None:
    slowest = min(rates)
    alike = [slowest * (1 + (rate - slowest) / 500) for rate in rates]  # up to twice as fast
    assert Clock(*alike, sequences=sequences).run(seconds) == {}


@pytest.mark.parametrize(
    "kind", [{"failures": Failures(silent_after=500)}, {"step_seconds": 0.2}], ids=["silent", "slow"]
)  # fmt: skip
async def test_a_laggard_holds_nobody(redis, run_id, tmp_path, monkeypatch, kind) -> None:
    """It keeps its lease, and calls on it have all the time that there is; the run goes on without it."""
    monkeypatch.setattr(straggler_detection, "SILENCE_TIMEOUT", 1.0)
    monkeypatch.setattr(straggler_detection, "WINDOW_SECONDS", 1.0)
    sections = {"rollout": {"chunk_timeout": 120.0, "start_timeout": 60.0}, "iterations": 4}
    run = await make_run(redis, run_id, config_tree(tmp_path, ROWS, **sections))
    usual = {"step_seconds": 0.004, "lengths": Lengths(60)}
    async with (
        simulated_replica(run, "good", **usual) as good,
        simulated_replica(run, "better", **usual) as better,
        simulated_replica(run, "bad", **{**usual, **kind}) as bad,
        serve((await run.config()).reward, run=run),
        idle_learner(run, [good, better, bad]) as learner,
    ):
        await run.set_state(RunState.RUNNING)
        began = time.monotonic()
        await asyncio.gather(orchestrate(run), learner.train(range(1, 5), [good, better, bad]))
        assert time.monotonic() - began < 30
        told = [record["text"] for _, record in await run.records("0", 0) if "suspended" in record.get("text", "")]
        assert told and all(text.startswith("replica bad is suspended for") for text in told)
        assert (await learner.log.audit()).clean
        assert {group.attempt for groups in learner.trained.values() for group in groups} == {1}
