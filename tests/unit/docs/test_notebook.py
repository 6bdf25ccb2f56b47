"""Runs the blocks of the page about notebooks, in order, on a recorded run."""

from pathlib import Path
from typing import Any

import pytest

from support.guide import ROOT, blocks
from support.recorded_run import record_run

PAGE = ROOT / "docs" / "notebook.md"
BLOCKS = [block.text for block in blocks(PAGE)]


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    record_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    assert len(BLOCKS) >= 6
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["best"] == 3
    assert len(names["wrong"]) == 8
    assert "iteration 3/3  reward 0.300" in capsys.readouterr().out
