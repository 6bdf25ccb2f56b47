"""The x axes of curves: what a run had spent at each step."""

from pathlib import Path

import numpy as np
import pytest

from polyreme.rundir.reader import RunReader
from polyreme.rundir.reader.series import AXES, SAMPLES, SECONDS, TOKENS, Points, positions
from support.seeded_run import GROUPS, record_run
from support.seeded_run import SAMPLES as GROUP_SIZE
from support.seeded_run import SECONDS as ITERATION_SECONDS


def series(**metrics: dict[int, float]) -> dict[str, Points]:
    return {
        name.replace("__", "/"): (np.array(list(values), np.int64), np.array(list(values.values())))
        for name, values in metrics.items()
    }


def found(axis: str, metrics: dict[str, Points]) -> dict[int, float]:
    steps, values = positions(axis, lambda name: metrics.get(name, (np.empty(0, np.int64), np.empty(0))))
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


RUN = series(
    time={4: 110.0, 5: 130.0, 6: 125.0},
    time__iteration={4: 10.0, 5: 20.0, 6: 5.0},
    tokens_per_second={4: 3.0, 5: 1.5, 6: 2.0},
    samples_per_second={4: 0.8, 6: 0.4},
)


def test_what_was_spent_is_summed_over_the_steps() -> None:
    assert found(SECONDS, RUN) == {4: 10.0, 5: 30.0, 6: 30.0}  # a clock that is set back does not turn a curve
    assert found(TOKENS, RUN) == {4: 30.0, 5: 60.0, 6: 70.0}
    assert found(SAMPLES, RUN) == {4: 8.0, 6: 10.0}  # without the step whose rate is unknown


def test_a_stage_has_its_own_names() -> None:
    stage = series(time={1: 3.0, 2: 5.0}, train__time__step={1: 1.0, 2: 2.0}, train__tokens_per_second={1: 7.0, 2: 8.0})
    assert found(SECONDS, stage) == {1: 1.0, 2: 3.0} and found(TOKENS, stage) == {1: 7.0, 2: 23.0}
    assert found(SAMPLES, stage) == {}


@pytest.mark.parametrize("axis", AXES)
def test_a_run_without_records_has_no_positions(axis: str) -> None:
    assert found(axis, {}) == {}


def test_a_reader_gives_them_as_curves(tmp_path: Path) -> None:
    record_run(tmp_path / "run", iterations=6, seed=1)
    reader = RunReader(tmp_path / "run")
    reader.refresh()
    assert reader.curve(SECONDS, 100).mean == pytest.approx(ITERATION_SECONDS * np.arange(1, 7))
    assert reader.curve(SAMPLES, 100, 5).mean.tolist() == [GROUPS * GROUP_SIZE * each for each in (5, 6)]
    few = reader.curve(SAMPLES, 3)
    assert few.steps.tolist() == [2, 4, 6] and few.mean.tolist() == [GROUPS * GROUP_SIZE * each for each in (2, 4, 6)]
    assert few.low is few.mean
    assert "actor/ppo_kl" in reader.contents().zeros and "entropy" not in reader.contents().zeros
