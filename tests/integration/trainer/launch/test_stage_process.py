"""The supervision of a stage: its state follows from the end of its ranks and their records. The ranks here do not train."""

import asyncio
import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polyreme.errors import RunFailedError
from polyreme.experience.run import RunState
from polyreme.rundir.run_directory import read_run_file
from polyreme_trainer.launch.stage_process import StageSupervision
from support.stages import prepared, stage_config
from support.waiting import until

RECORD = """
import json, os, signal, sys, time
from pathlib import Path
folder = Path(os.environ["POLYREME_RUN_DIR"])
run = json.loads((folder / "run.json").read_text())["run_id"]
def record(kind, **fields):
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"run": run, "time": 0.0, "kind": kind, **fields}) + "\\n")
def step(number):
    record("step", step=number, steps=3, loss=1 / number, **{"time/step": 0.5})
def done():
    record("done", step=3, hf_path=str(folder / "hf" / "final"))
"""
WELL = RECORD + "step(1); step(2); step(3); done()"
SILENT = RECORD + "step(1)"
DRAINS = (
    RECORD
    + "signal.signal(signal.SIGTERM, lambda *_: (record('saved', step=1, path='there'), sys.exit(0)))\nstep(1)\nwhile True: time.sleep(0.02)"
)
EARLY = RECORD + "step(1); time.sleep(600)"
DIES_ONCE = (
    RECORD
    + "mark = folder / 'died'\nif mark.exists():\n    step(2); step(3); done()\nelse:\n    mark.touch(); step(1); os.kill(os.getpid(), 9)"
)


def process(folder: Path, script: str, **changes: Any) -> tuple[StageSupervision, Path, io.StringIO]:
    config = stage_config(folder, "sft", trainer__parallel={"data": 2} if script is WELL else {}, **changes)
    run_dir, shown = prepared(config), io.StringIO()
    run = read_run_file(run_dir)
    assert run is not None
    log_dir = folder / "logs"
    log_dir.mkdir()
    return StageSupervision(config, run.run_id, log_dir, Console(file=shown, width=200), ("-c", script)), run_dir, shown


def summary(run_dir: Path) -> dict[str, object]:
    fields: dict[str, object] = json.loads((run_dir / "summary.json").read_text())
    return fields


async def test_a_stage_whose_ranks_record_the_end_is_done(tmp_path: Path) -> None:
    stage, run_dir, shown = process(tmp_path, WELL)
    assert await stage.run() is RunState.DONE
    found = summary(run_dir)
    assert (found["state"], found["step"], found["steps"]) == ("done", 3, 3)
    assert str(run_dir / "hf" / "final") in shown.getvalue()


async def test_the_end_of_a_stage_is_a_notice(tmp_path: Path) -> None:
    command = ["sh", "-c", f'printf "%s\\n" "$POLYREME_NOTICE_TEXT" >> {tmp_path}/texts']
    stage, _, _ = process(tmp_path, WELL, notices=[{"kind": "command", "command": command}])
    assert await stage.run() is RunState.DONE
    assert (tmp_path / "texts").read_text() == "sft is done\n"


async def test_ranks_that_end_without_a_word_have_failed(tmp_path: Path) -> None:
    stage, run_dir, _ = process(tmp_path, SILENT)
    with pytest.raises(RunFailedError):
        await stage.run()
    assert summary(run_dir)["state"] == "failed"


@pytest.mark.parametrize("script", [DRAINS, EARLY], ids=["saves", "before its handler"])
async def test_a_stop_reaches_the_ranks(tmp_path: Path, script: str) -> None:
    stage, run_dir, _ = process(tmp_path, script)
    work = asyncio.create_task(stage.run())
    metrics = run_dir / "metrics.jsonl"
    await until(lambda: metrics.exists() and metrics.read_text().endswith("\n"))
    os.kill(os.getpid(), signal.SIGTERM)
    assert await work is RunState.STOPPED
    assert summary(run_dir)["state"] == "stopped" and summary(run_dir)["step"] == 1


async def test_ranks_that_die_are_started_again(tmp_path: Path) -> None:
    stage, run_dir, shown = process(tmp_path, DIES_ONCE)
    assert await stage.run() is RunState.DONE
    assert "SIGKILL" in shown.getvalue() and summary(run_dir)["state"] == "done"
