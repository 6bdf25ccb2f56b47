"""The loop of the stages with an engine without a model: order, evaluations, checkpoints, and the same result after any stop."""

import errno
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from polyreme.config.stage import STAGES, StageConfig
from polyreme.errors import GateError
from polyreme_trainer.data.stage_rows import StageRows, mismatched
from polyreme_trainer.data.template import Template
from polyreme_trainer.learner.engine import Saved
from polyreme_trainer.learner.gates import Gate
from polyreme_trainer.stages.program import Best, StageLog, loaded_best, run_stage, total_steps
from polyreme_trainer.stages.table import TABLE
from support.stages import DigestEngine, Recorded, one_rank, stage_config, write_data
from support.tiny_tokenizer import model_files


@pytest.fixture(params=list(STAGES))
def config(request: pytest.FixtureRequest, tmp_path: Path) -> StageConfig:
    write_data(tmp_path)
    return stage_config(tmp_path, request.param)


def run(config: StageConfig, recorded: Recorded, engine: DigestEngine | None = None) -> bool:
    template, ranks, engine = Template(model_files(), config.data), one_rank(), engine or DigestEngine(config)
    stage = TABLE[config.stage]
    try:
        complete = run_stage(config, template, stage, engine, ranks, StageLog(ranks, recorded.write, recorded.drains))
    finally:
        ranks.close()
    engine.close()
    return complete


def exported(config: StageConfig) -> str:
    return (config.run_dir / "hf" / "final" / "weights").read_text()


def test_a_stage_evaluates_saves_and_exports_where_it_should(config: StageConfig) -> None:
    recorded = Recorded()
    assert run(config, recorded)
    happened = [(record["kind"], record.get("step")) for record in recorded.records]
    assert happened == [
        ("eval", 0),
        *(("step", 1), ("step", 2), ("eval", 2)),
        *(("step", 3), ("saved", 2), ("step", 4), ("eval", 4)),
        *(("step", 5), ("saved", 4), ("step", 6), ("eval", 6)),
        *(("saved", 6), ("gate", None), ("done", 6)),
    ]
    assert all(record["stall_seconds"] >= 0 for record in recorded.records if record["kind"] == "saved")
    evaluation = recorded.records[0]
    assert "loss" in evaluation and "none" not in evaluation
    assert evaluation["rows"] > 0


@pytest.mark.parametrize("until", [1, 4, 9, 13])
def test_a_stage_that_stops_anywhere_goes_on_to_the_same_weights(config: StageConfig, until: int) -> None:
    whole = config.model_copy(update={"name": "whole"})
    assert run(whole, Recorded())
    stopped = run(config, Recorded(until))
    if not stopped:
        assert run(config, Recorded())
    assert exported(config) == exported(whole)


@pytest.fixture
def sft(tmp_path: Path) -> StageConfig:
    write_data(tmp_path)
    return stage_config(tmp_path, "sft")


def test_the_next_save_waits_for_the_previous_one(sft: StageConfig) -> None:
    every_step = sft.model_copy(update={"trainer": sft.trainer.model_copy(update={"save_interval": 1})})
    recorded = Recorded()
    assert run(every_step, recorded)
    assert [record["step"] for record in recorded.records if record["kind"] == "saved"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(("minutes", "saved"), [(None, [6]), (1e-9, [1, 3, 5, 6])])
def test_without_an_interval_saves_follow_by_time(sft: StageConfig, minutes: float | None, saved: list[int]) -> None:
    """By default a stage of seconds is saved once, at its end. No save follows one that is still being written."""
    changes = {"save_interval": 0, "save_minutes": minutes}
    recorded = Recorded()
    assert run(sft.model_copy(update={"trainer": sft.trainer.model_copy(update=changes)}), recorded)
    assert [record["step"] for record in recorded.records if record["kind"] == "saved"] == saved


def test_a_resumed_stage_says_where_it_continues(sft: StageConfig) -> None:
    assert not run(sft, Recorded(9))
    recorded = Recorded()
    assert run(sft, recorded)
    first, *others = recorded.records
    assert first["kind"] == "resumed" and first["step"] + 1 == next(each for each in others if each["kind"] == "step")["step"]


@pytest.mark.parametrize("failing", [2, 6])
def test_the_error_of_a_save_ends_the_stage(sft: StageConfig, failing: int) -> None:
    """Also that of the last save, for which nothing but the end of the stage waits."""

    class Full(DigestEngine):
        def finish_save(self, wait: bool) -> Saved | None:
            saved = super().finish_save(wait)
            if saved is not None and saved.number == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(saved.path))
            return saved

    recorded = Recorded()
    with pytest.raises(OSError) as error:
        run(sft, recorded, Full(sft))
    assert error.value.errno == errno.ENOSPC
    assert [record["step"] for record in recorded.records if record["kind"] == "saved"] == list(range(2, failing, 2))
    assert not any(record["kind"] == "done" for record in recorded.records)


def kept(config: StageConfig) -> dict[str, str]:
    return {file.name: file.read_text() for file in (config.run_dir / "hf" / "best").iterdir()}


def best_records(recorded: Recorded) -> list[int]:
    return [record["step"] for record in recorded.records if record["kind"] == "saved" and "hf_path" in record]


LOSSES = {0: 0.1, 2: 3.0, 4: 1.0, 6: 2.0}


@pytest.mark.parametrize("until", [None, 9])
def test_the_saved_step_with_the_lowest_held_out_loss_is_kept(sft: StageConfig, until: int | None) -> None:
    """Also if the stage stops and continues."""
    recorded, weights = Recorded(until), dict[int, str]()

    class Watched(DigestEngine):
        def optim_step(self, role: str, lr: float) -> Mapping[str, float]:
            metrics = super().optim_step(role, lr)
            weights[self.number] = self.weights
            return metrics

    if not run(sft, recorded, Watched(sft, LOSSES)):
        recorded.until = None
        assert run(sft, recorded, Watched(sft, LOSSES))
    assert kept(sft) == {"weights": weights[4], "step": "4\n"}
    assert best_records(recorded) == [2, 4]


def test_the_last_step_is_kept_as_the_best_one_without_another_copy(sft: StageConfig) -> None:
    for _ in range(2):  # the second run only exports again
        recorded = Recorded()
        assert run(sft, recorded, DigestEngine(sft, {**LOSSES, 6: 0.5}))
        assert kept(sft) == {"weights": exported(sft), "step": "6\n"}
        assert (sft.run_dir / "hf" / "best" / "weights").samefile(sft.run_dir / "hf" / "final" / "weights")
    assert best_records(recorded) == []


def test_losses_of_other_held_out_rows_are_not_compared(sft: StageConfig) -> None:
    assert not run(sft, Recorded(5), DigestEngine(sft, LOSSES))
    rows = sft.data.eval
    assert isinstance(rows, Path)
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:5]))
    recorded = Recorded()
    assert run(sft, recorded, DigestEngine(sft, {4: 9.0, 6: 9.5}))
    assert best_records(recorded)[-1:] == [4] and kept(sft)["step"] == "4\n"


def test_losses_of_another_objective_are_not_compared(tmp_path: Path) -> None:
    """A fork may change the loss. A checkpoint of 0.2.0 names the held-out rows only."""
    write_data(tmp_path)
    dpo, ipo = (stage_config(tmp_path, "dpo", loss={"kind": kind}) for kind in ("dpo", "ipo"))
    assert not run(dpo, Recorded(5), DigestEngine(dpo, LOSSES))
    assert run(ipo, Recorded(), DigestEngine(ipo, {4: 9.0, 6: 9.5}))
    assert kept(ipo)["step"] == "4\n"
    older = Best(2, 3.0, "digest")
    facts = {"best": asdict(older)}
    assert loaded_best(facts, "digest CrossEntropy()") == older and loaded_best(facts, "other") is None


def test_a_stage_without_held_out_rows_keeps_no_best_step(sft: StageConfig) -> None:
    without = sft.model_copy(update={"data": sft.data.model_copy(update={"eval": None})})
    assert run(without, Recorded())
    assert not (sft.run_dir / "hf" / "best").exists()


def test_a_finished_stage_trains_nothing_more_and_exports_again(config: StageConfig) -> None:
    assert run(config, Recorded())
    recorded = Recorded()
    assert run(config, recorded)
    assert [record["kind"] for record in recorded.records] == ["gate", "done"]


def test_another_seed_takes_the_rows_in_another_order(config: StageConfig) -> None:
    other = config.model_copy(update={"name": "other", "seed": 1})
    assert run(config, Recorded()) and run(other, Recorded())
    assert exported(config) != exported(other)


def test_an_export_that_computes_something_else_fails_the_stage(config: StageConfig) -> None:
    class Wrong(DigestEngine):
        def export(self, path: Path) -> list[Gate]:
            return [Gate("difference", 1.0, 1e-3, "See the model.")]

    recorded = Recorded()
    with pytest.raises(GateError):
        run(config, recorded, Wrong(config))
    assert [record["kind"] for record in recorded.records[-1:]] == ["gate"]


def test_the_length_follows_from_steps_or_passes(tmp_path: Path) -> None:
    assert total_steps(10, stage_config(tmp_path, "sft").trainer) == 6
    passes = {"trainer__steps": None, "trainer__batch_size": 4}
    assert total_steps(10, stage_config(tmp_path, "sft", **passes, trainer__epochs=2).trainer) == 5
    assert total_steps(1, stage_config(tmp_path, "sft", **passes, trainer__epochs=0.5).trainer) == 1


def test_a_mismatched_row_has_the_next_rows_answer() -> None:
    ids = [np.array(each, dtype=np.int32) for each in ([1, 1, 5, 6], [2, 7], [3, 3, 3, 8, 9])]
    masks = [np.array(each, dtype=np.uint8) for each in ([0, 0, 1, 1], [0, 1], [0, 0, 0, 1, 1])]
    found = mismatched(StageRows(ids, masks), range(3), longest=4)
    assert [each.tolist() for each in found.ids] == [[1, 1, 7], [2, 8, 9], [3, 3, 3, 5]]
    assert [each.tolist() for each in found.loss_mask] == [[0, 0, 1], [0, 1, 1], [0, 0, 0, 1]]
    alone = mismatched(StageRows(ids, masks), [1], longest=4)
    assert [each.tolist() for each in alone.ids] == [[2, 8, 9]], "the neighbour need not be among the chosen rows"


def test_every_schema_has_its_stage() -> None:
    assert TABLE.keys() == STAGES.keys()
