"""The last lines of a stage."""

from pathlib import Path

import pytest

from polyreme.config.stage import STAGES
from polyreme_trainer.command import next_lines
from support.stages import stage_config, write_data


@pytest.mark.parametrize("stage", list(STAGES))
def test_the_last_lines_say_what_the_result_is_for(stage: str, tmp_path: Path) -> None:
    write_data(tmp_path)
    config = stage_config(tmp_path, stage)
    first, second = next_lines(config)
    final = config.run_dir / "hf" / "final"
    if stage == "reward-model":
        assert f"model: {final}" in first and "polyreme chat" not in first
    else:
        assert f"polyreme chat {config.run_dir}" in first and f"model.path={final}" in first
    assert f"polyreme ui {config.run_dir}" in second
