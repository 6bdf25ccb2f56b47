"""A loop's saves: one at a time, each reported once with the pause of training."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from polyreme.config.stage import StageTrainer
from polyreme.config.trainer import TrainerConfig
from polyreme_trainer.learner.engine import Saved
from polyreme_trainer.learner.saving import Saving

COPY_SECONDS = 0.05


class Engine:
    """Saves that complete when they are waited for, or with `complete`."""

    def __init__(self) -> None:
        self.pending: int | None = None
        self.complete = False

    def begin(self, number: int) -> Callable[[], None]:
        def begin() -> None:
            assert self.pending is None, "one save at a time"
            self.pending, self.complete = number, False
            time.sleep(COPY_SECONDS)

        return begin

    def finish(self, wait: bool) -> Saved | None:
        if self.pending is None or not (wait or self.complete):
            return None
        number, self.pending = self.pending, None
        return Saved(number, Path(str(number)), None, number, 1.0)


@pytest.fixture
def reports() -> list[tuple[int, float]]:
    return []


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def saving(engine: Engine, reports: list[tuple[int, float]]) -> Saving:
    return Saving(engine.finish, lambda saved, stall: reports.append((saved.number, stall)))


def test_a_save_waits_for_the_previous_one(saving: Saving, engine: Engine, reports: list[tuple[int, float]]) -> None:
    saving.start(engine.begin(1))
    assert reports == []
    saving.start(engine.begin(2))
    assert [number for number, _ in reports] == [1]
    saving.finish(wait=True)
    assert [number for number, _ in reports] == [1, 2]
    assert all(stall >= COPY_SECONDS for _, stall in reports)


def test_a_save_is_reported_once_and_when_it_is_complete(
    saving: Saving, engine: Engine, reports: list[tuple[int, float]]
) -> None:
    saving.start(engine.begin(1))
    saving.finish(wait=False)
    assert reports == []
    engine.complete = True
    for wait in (False, False, True):
        saving.finish(wait)
    assert [number for number, _ in reports] == [1]


def test_a_save_is_late_when_the_newest_complete_one_is_too_old(engine: Engine) -> None:
    now = 0.0
    saving = Saving(engine.finish, lambda saved, stall: None, clock=lambda: now)
    now = 9.0
    assert not saving.is_late(10.0)
    now = 10.0
    assert saving.is_late(10.0) and not saving.is_late(0.0)
    saving.start(engine.begin(1))
    now = 90.0
    assert not saving.is_late(10.0), "it is being written"
    saving.finish(wait=True)
    assert not saving.is_late(10.0)
    now = 100.0
    assert saving.is_late(10.0)


@pytest.mark.parametrize(
    ("interval", "minutes", "seconds"), [(0, None, 600.0), (5, None, 0.0), (0, 0.0, 0.0), (5, 2.0, 120.0), (0, 30.0, 1800.0)]
)
def test_without_an_interval_a_checkpoint_follows_by_time(interval: int, minutes: float | None, seconds: float) -> None:
    keys = {"save_interval": interval, "save_minutes": minutes, "optimizer": {"lr": 1e-3}}
    assert TrainerConfig.model_validate(keys).save_seconds == seconds
    assert StageTrainer.model_validate({**keys, "batch_size": 4}).save_seconds == seconds
