"""`polyreme sft`, `polyreme reward-model`, `polyreme dpo`: a stage on this machine, from its check to the exported model.

Invariant: a stage needs no rollout, no reward and no Redis. Its run directory contains everything for a resume.
"""

import asyncio
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polyreme.config.load import load_stage
from polyreme.config.stage import StageConfig
from polyreme.display.summary import stage_lines
from polyreme.experience.run import RunState
from polyreme.rundir.checks import check_run
from polyreme.rundir.run_directory import check_resumable, claim, next_attempt, open_stage, owned, read_stage_config
from polyreme.rundir.run_records import read_summary
from polyreme.rundir.start_day import dated, first_day
from polyreme.terminal.completion import DpoOverrides, RewardModelOverrides, SftOverrides
from polyreme.terminal.terminal import TerminalConsole
from polyreme_trainer.launch.stage_process import StageProcess
from polyreme_trainer.stages.loop import FINAL, HF

ConfigFile = Annotated[Path, typer.Argument(help="The stage's YAML file.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the directory's stage from its newest checkpoint.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the summary, and start nothing.")]


def sft(config: ConfigFile, overrides: SftOverrides = None, resume: Resume = False, dry_run: DryRun = False) -> None:
    """Train a model on answers (supervised fine-tuning)."""
    run(load_stage(config, overrides or (), "sft"), resume, dry_run)


def reward_model(
    config: ConfigFile, overrides: RewardModelOverrides = None, resume: Resume = False, dry_run: DryRun = False
) -> None:
    """Train a reward model on pairs of answers."""
    run(load_stage(config, overrides or (), "reward-model"), resume, dry_run)


def dpo(config: ConfigFile, overrides: DpoOverrides = None, resume: Resume = False, dry_run: DryRun = False) -> None:
    """Train a policy on preferences: DPO, IPO, KTO, SimPO or ORPO."""
    run(load_stage(config, overrides or (), "dpo"), resume, dry_run)


def run(config: StageConfig, resume: bool, dry_run: bool) -> None:
    """Checks a stage and runs it to its end, in the foreground. Raises PolyremeError."""
    console = TerminalConsole(sys.stdout)
    if resume:
        check_resumable(config)
    notices = check_run(config)
    if dry_run:
        console.print("\n".join(stage_lines(config, notices)), soft_wrap=True)
        return
    with owned(config.run_dir):
        existing = claim(config, resume)
        config = dated(config, first_day(config.run_dir, existing.run_id if existing else None))
        if existing is not None and (step := finished(config, existing.run_id)):
            console.print(f"stage {existing.run_id} is done: {step} steps are trained", soft_wrap=True)
            return
        console.print("\n".join(stage_lines(config, notices)), soft_wrap=True)
        run_id = open_stage(config, existing).run_id
        asyncio.run(_run(config, run_id, console))


async def _run(config: StageConfig, run_id: str, console: Console) -> None:
    log_dir = next_attempt(config.run_dir)
    console.print(f"run            {run_id} in {config.run_dir}, logs in {log_dir}", soft_wrap=True)
    state = await StageProcess(config, run_id, log_dir, console).run()
    if state is RunState.STOPPED:
        console.print("stopped and saved; continue with --resume")
        return
    for line in next_lines(config):
        console.print(line, soft_wrap=True)


def next_lines(config: StageConfig) -> list[str]:
    """The commands that a user needs after a stage."""
    result, where = config.run_dir / HF / FINAL, shlex.quote(str(config.run_dir))
    if config.stage == "reward-model":
        use = f"next     reward: {{rewards: [{{model: {result}}}]}}  # in a run, or for `polyreme reward test`"
    else:
        use = f"next     polyreme chat {where}  # ask the model; in a run: model.path={result}"
    return [use, f"         polyreme ui {where}  # its curves"]


def finished(config: StageConfig, run_id: str) -> int:
    """The number of trained steps of a stage that is complete at the current length; 0: steps remain."""
    summary = read_summary(config.run_dir)
    before = read_stage_config(config.run_dir).trainer
    same = (before.steps, before.epochs) == (config.trainer.steps, config.trainer.epochs)
    return int(summary["step"]) if same and summary.get("run") == run_id and summary.get("state") == RunState.DONE else 0
