"""The warm start's plan: rates and rows."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme.config.trainer import SftPhase
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.engine import RowsLoss, Saved
from polyreme_trainer.stages.steps import batches
from polyreme_trainer.stages.warm_start import FLOOR, REPORT_SECONDS, learning_rate, run_phase, warm_start
from support.configs import run_config
from support.stages import one_rank
from support.tiny_tokenizer import model_files


def phase(**changes: object) -> SftPhase:
    fields = {"data": Path("rows.jsonl"), "steps": 100, "batch_size": 4, "lr": 2e-3, "warmup": 10, "cooldown": 20}
    return SftPhase.model_validate(fields | changes)


def test_the_rate_warms_up_holds_and_cools_down() -> None:
    rates = [learning_rate(phase(), step) / 2e-3 for step in range(1, 101)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10)
    assert rates[10:80] == pytest.approx([1.0] * 70)
    np.testing.assert_allclose(rates[80:], FLOOR + (1 - FLOOR) * np.arange(19, -1, -1) / 20)
    assert rates[-1] == pytest.approx(FLOOR)


def test_without_ramps_the_rate_is_constant() -> None:
    assert {learning_rate(phase(warmup=0, cooldown=0), step) for step in range(1, 101)} == {2e-3}


def test_passes_over_the_rows_are_complete_shuffled_and_repeatable() -> None:
    taken = np.concatenate(list(batches(7, 7, 4, seed=(3, 0))))
    assert len(taken) == 28
    passes = taken.reshape(4, 7)
    for one in passes:
        assert sorted(one.tolist()) == list(range(7))
    assert len({tuple(p) for p in passes}) > 1
    np.testing.assert_array_equal(taken, np.concatenate(list(batches(7, 7, 4, seed=(3, 0)))))
    assert (taken != np.concatenate(list(batches(7, 7, 4, seed=(4, 0))))).any()


def test_fewer_rows_than_a_batch_repeat_within_it() -> None:
    (rows,) = batches(3, 1, 7, seed=(0, 0))
    assert np.bincount(rows, minlength=3).tolist() in ([3, 2, 2], [2, 3, 2], [2, 2, 3])


class Engine:
    """Saves at once, and trains nothing."""

    def __init__(self) -> None:
        self.saves: list[tuple[int, dict[str, int]]] = []
        self.written = True

    def load_warm_start(self) -> None:
        return None

    def begin_phase(self, phase: SftPhase) -> None:
        pass

    def forward_backward(self, role: str, rows: StageRows, loss: RowsLoss) -> list[Any]:
        return []

    def optim_step(self, role: str, lr: float) -> None:
        pass

    def means(self, metrics: list[Any]) -> dict[str, float]:
        return {"loss": 1.0}

    def save_warm_start(self, steps: int, facts: dict[str, int]) -> None:
        self.saves.append((steps, facts))
        self.written = False

    def finish_save(self, wait: bool) -> Saved | None:
        if self.written:
            return None
        self.written = True
        return Saved(self.saves[-1][0], Path("there"), None, 0, 0.1)


@pytest.mark.parametrize(("minutes", "within"), [(None, []), (1e-9, [(10, 0, 10), (20, 0, 20)])])
def test_a_phase_is_saved_by_time(tmp_path: Path, minutes: float | None, within: list[tuple[int, int, int]]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    phases = [SftPhase(data=tmp_path / "rows.jsonl", steps=steps, batch_size=1, lr=1e-3) for steps in (25, 5)]
    base = run_config(tmp_path)
    config = base.model_copy(update={"trainer": base.trainer.model_copy(update={"sft": phases, "save_minutes": minutes})})
    engine: Any = Engine()
    ranks = one_rank()
    assert warm_start(engine, config, model_files(), ranks, lambda record: False)
    ranks.close()
    found = [(steps, facts["phase"], facts["step"]) for steps, facts in engine.saves]
    assert found == [*within, (25, 1, 0)]


class SlowEngine(Engine):
    """Its first step takes as long as a report may be late."""

    def optim_step(self, role: str, lr: float) -> None:
        if self.written:
            time.sleep(REPORT_SECONDS)


def test_a_drain_is_seen_between_slow_steps(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    slow = SftPhase(data=tmp_path / "rows.jsonl", steps=3, batch_size=1, lr=1e-3)
    base = run_config(tmp_path)
    config = base.model_copy(update={"trainer": base.trainer.model_copy(update={"sft": [slow]})})
    engine: Any = SlowEngine()
    ranks = one_rank()
    assert not warm_start(engine, config, model_files(), ranks, lambda record: True)
    ranks.close()
    assert engine.saves == [(1, {"phase": 0, "step": 1})]


def test_records_name_the_phase_that_they_are_of() -> None:
    engine: Any = Engine()
    rows = StageRows([np.array([1, 2], dtype=np.int32)], [np.array([0, 1], dtype=np.uint8)])
    for number in (0, 1):
        records = list(run_phase(engine, phase(steps=25), rows, seed=0, number=number))
        assert [(record.phase, record.step) for record in records] == [(number + 1, step) for step in (10, 20, 25)]
    assert [record.step for record in run_phase(engine, phase(steps=25), rows, seed=0, done=15)] == [20, 25]
