"""The loop of the stages with an engine without a model: order, evaluations, checkpoints, and the same result after any stop."""

from pathlib import Path

import numpy as np
import pytest

from polyreme.config.stage import STAGES, StageConfig
from polyreme.errors import GateError
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.template import Template
from polyreme_trainer.learner.gates import Gate
from polyreme_trainer.learner.stage_engine import mismatched
from polyreme_trainer.stages.loop import StageLoop, total_steps
from polyreme_trainer.stages.table import TABLE
from support.stages import DigestEngine, Recorded, one_rank, stage_config, write_data
from support.tiny_tokenizer import model_files


@pytest.fixture(params=list(STAGES))
def config(request: pytest.FixtureRequest, tmp_path: Path) -> StageConfig:
    write_data(tmp_path)
    return stage_config(tmp_path, request.param)


def run(config: StageConfig, recorded: Recorded, engine: DigestEngine | None = None) -> bool:
    template, ranks = Template(model_files(), config.data), one_rank()
    loop = StageLoop(
        config,
        template,
        TABLE[config.stage].read,
        engine or DigestEngine(config),
        ranks,
        recorded.emit,
        recorded.drains,
    )
    try:
        return loop.run()
    finally:
        ranks.close()


def exported(config: StageConfig) -> str:
    return (config.run_dir / "hf" / "final" / "weights").read_text()


def test_a_stage_evaluates_saves_and_exports_where_it_should(config: StageConfig) -> None:
    recorded = Recorded()
    assert run(config, recorded)
    happened = [(record["kind"], record.get("step")) for record in recorded.records]
    assert happened == [
        ("eval", 0),
        *(("step", 1), ("step", 2), ("eval", 2), ("saved", 2)),
        *(("step", 3), ("step", 4), ("eval", 4), ("saved", 4)),
        *(("step", 5), ("step", 6), ("eval", 6), ("saved", 6)),
        *(("gate", None), ("done", 6)),
    ]
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
    found = mismatched(StageRows(ids, masks), longest=4)
    assert [each.tolist() for each in found.ids] == [[1, 1, 7], [2, 8, 9], [3, 3, 3, 5]]
    assert [each.tolist() for each in found.loss_mask] == [[0, 0, 1], [0, 1, 1], [0, 0, 0, 1]]


def test_every_schema_has_its_stage() -> None:
    assert TABLE.keys() == STAGES.keys()
