"""The commands of the trainer. `polyreme train` opens a run, or joins the one that `polyreme up` opened, and supervises its
trainer. `polyreme learner` runs the ranks of a further machine of the learner. `polyreme sft`, `reward-model` and `dpo` run a
stage on this machine, from its check to the exported model.

Invariant: a run that `polyreme up` opened is joined and never opened again; its configuration is the one that `up` checked. A
stage needs no rollout, no reward and no Redis.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from polyreme.config.load import load_config, load_stage
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.display.summary import stage_lines, summary_lines
from polyreme.experience.listing import service_run
from polyreme.experience.run import Run, RunState
from polyreme.experience.store import connected
from polyreme.hub.resolve import resolve_names
from polyreme.net.ports import check_free
from polyreme.net.redis_url import exposure, redis_option
from polyreme.process import logging_setup
from polyreme.process.event_loop import run_service
from polyreme.process.tasks import task_group
from polyreme.rundir.checks import check_run
from polyreme.rundir.run_directory import make_folder, next_attempt, open_run, open_stage
from polyreme.rundir.start import Start, prepared, start_of
from polyreme.terminal.completion import DpoOverrides, Overrides, RewardModelOverrides, SftOverrides
from polyreme.terminal.terminal import TerminalConsole
from polyreme_trainer.launch.trainer_process import RendezvousAddress, Trainer, trainer_processes
from polyreme_trainer.launch.worker_node import serve_launches

logger = logging.getLogger(__name__)

_ATTACH_SECONDS = 10.0
_ANY = "0.0.0.0"

StageFile = Annotated[Path, typer.Argument(help="The stage's YAML file.")]
ResumeStage = Annotated[bool, typer.Option("--resume", help="Continue the directory's stage from its newest checkpoint.")]
ForkStage = Annotated[
    bool, typer.Option("--fork", help="Start a new stage, in a new directory, from the stage's newest checkpoint.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, print the summary, and start nothing.")]


def train(
    config: Annotated[Path, typer.Argument(help="The run's YAML file.")],
    overrides: Overrides = None,
    redis: Annotated[str, redis_option("URL of the run's Redis.")] = "redis://127.0.0.1:6379",
    run: Annotated[str | None, typer.Option(help="Id of an existing run; without it, a new one.")] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Directory of the children's logs; without it, the run directory's next attempt.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the directory's run, or start it if there is none; with name=..., it must exist."
        ),
    ] = False,
    fork: Annotated[
        bool, typer.Option("--fork", help="Start a new run, in a new directory, from the run's newest checkpoint.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address of the HTTP port.")] = "127.0.0.1",
    http_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of /health, /ready and /metrics; 0: a free one; without it, none is served."),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST",
            help="Address at which the learner's other machines reach this one; without it, its address towards Redis.",
            show_default=False,
        ),
    ] = None,
    learner_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port of the rendezvous of the learner's machines, when there are several; 0: a free one."
        ),
    ] = 0,
    start: Annotated[int | None, typer.Option(hidden=True, help="Which of the run's starts this process belongs to.")] = None,
) -> None:
    """Train a run: supervise its orchestrator and learner ranks, and write its records."""
    logging_setup.setup("train")
    for where, number in ((host, http_port), (_ANY, learner_port)):
        if number:
            check_free(where, number)
    if log_dir is not None:
        make_folder(log_dir, "--log-dir")
    opened = prepared(config, overrides or [], resume, fork, only="trainer")
    with opened if run is None else _joined(config, overrides or []) as chosen:
        if chosen.finished:
            logger.info("%s", chosen.finished)
            return
        logs_to = log_dir or next_attempt(chosen.config.run_dir)
        rendezvous = RendezvousAddress(advertise, learner_port)
        run_service(_train(chosen, redis, run, logs_to, (host, http_port), rendezvous, start))


@contextmanager
def _joined(path: Path, overrides: list[str]) -> Iterator[Start[RunConfig]]:
    """Reads the configuration of a run that `polyreme up` has checked and opened."""
    yield Start(load_config(path, overrides))


async def _train(
    chosen: Start[RunConfig],
    redis_url: str,
    run_id: str | None,
    log_dir: Path,
    http: tuple[str, int | None],
    rendezvous: RendezvousAddress,
    start: int | None,
) -> None:
    config = chosen.config
    async with connected(redis_url) as redis:
        if run_id is None:
            run = await open_run(redis, config, chosen.existing, redis_url, redis_url, chosen.origin)
            for line in summary_lines(config, [*chosen.notices, *filter(None, [exposure(redis_url)])]):
                logger.info(line)
        else:
            run = await Run.attach(redis, run_id, _ATTACH_SECONDS, start=start)
        process_sets = trainer_processes(config, run.run_id, redis_url, log_dir, rendezvous=rendezvous)
        async with task_group() as group:
            training = group.create_task(Trainer(config, run, process_sets).run())
            serving = group.create_task(_serve_metrics(run, config, *http))
            await training
            serving.cancel()


async def _serve_metrics(run: Run, config: RunConfig, host: str, port: int | None) -> None:
    """Serves the HTTP port until it is cancelled; returns at once without a port."""
    if port is None:
        return
    export = await asyncio.to_thread(_exporter)  # the run's processes start meanwhile
    async with export(run, config, host, port) as bound:
        logger.info("serving metrics on port %d", bound)
        await asyncio.Event().wait()


def _exporter() -> Callable[[Run, RunConfig, str, int | None], AbstractAsyncContextManager[int | None]]:
    """`export`, whose module imports a web server."""
    from polyreme_trainer.observe.exporter import export

    return export


def learner(
    redis: Annotated[str, redis_option("URL of the run's Redis.")],
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id; without it, the newest run.")] = None,
    node: Annotated[int, typer.Option(envvar="POLYREME_NODE", min=1, help="Which of the other machines this is.")] = 1,
    wait: Annotated[float, typer.Option(envvar="POLYREME_WAIT", min=0, help="Seconds to wait for the run to appear.")] = 60.0,
) -> None:
    """Run one machine's share of a learner on several (trainer.parallel.nodes), until the run is done. The trainer has node 0."""
    logging_setup.setup(f"learner node {node}")
    asyncio.run(_learn(redis, run, node, wait))


async def _learn(redis_url: str, run_id: str | None, node: int, wait: float) -> None:
    async with service_run(redis_url, run_id, wait) as (run, stop):
        await serve_launches(run, await run.config(), redis_url, node, stop)
        await run.check()  # raises the reason when the run failed


def sft(
    config: StageFile,
    overrides: SftOverrides = None,
    resume: ResumeStage = False,
    fork: ForkStage = False,
    dry_run: DryRun = False,
) -> None:
    """Train a model on answers (supervised fine-tuning)."""
    run_stage("sft", config, overrides or (), resume, fork, dry_run)


def reward_model(
    config: StageFile,
    overrides: RewardModelOverrides = None,
    resume: ResumeStage = False,
    fork: ForkStage = False,
    dry_run: DryRun = False,
) -> None:
    """Train a reward model on pairs of answers."""
    run_stage("reward-model", config, overrides or (), resume, fork, dry_run)


def dpo(
    config: StageFile,
    overrides: DpoOverrides = None,
    resume: ResumeStage = False,
    fork: ForkStage = False,
    dry_run: DryRun = False,
) -> None:
    """Train a policy on preferences: DPO, IPO, KTO, SimPO or ORPO."""
    run_stage("dpo", config, overrides or (), resume, fork, dry_run)


def run_stage(stage: str, path: Path, overrides: Sequence[str], resume: bool, fork: bool, dry_run: bool) -> None:
    """Checks a stage and runs it to its end, in the foreground. Raises PolyremeError."""
    console, load = TerminalConsole(sys.stdout), partial(load_stage, path, stage=stage)
    if dry_run:
        config = resolve_names(load(overrides))
        console.print("\n".join(stage_lines(config, check_run(config))), soft_wrap=True)
        return
    with start_of(load, overrides, resume, fork) as start:
        if start.finished:
            console.print(start.finished, soft_wrap=True)
            return
        console.print("\n".join(stage_lines(start.config, start.notices)), soft_wrap=True)
        asyncio.run(_run_stage(start, console))


async def _run_stage(start: Start[StageConfig], console: Console) -> None:
    from polyreme_trainer.launch.stage_process import StageSupervision  # what only a stage needs delays no run

    config, run_id = start.config, open_stage(start.config, start.existing, start.origin).run_id
    if start.origin:
        console.print(f"forked from    {start.origin.run_id} at step {start.origin.iteration}", soft_wrap=True)
    log_dir = next_attempt(config.run_dir)
    console.print(f"run            {run_id} in {config.run_dir}, logs in {log_dir}", soft_wrap=True)
    state = await StageSupervision(config, run_id, log_dir, console).run()
    if state is RunState.STOPPED:
        console.print("stopped and saved; continue with --resume")
        return
    for line in next_lines(config):
        console.print(line, soft_wrap=True)


def next_lines(config: StageConfig) -> list[str]:
    """The commands that a user needs after a stage."""
    from polyreme_trainer.stages.program import FINAL, HF

    result = config.run_dir / HF / FINAL
    if config.stage == "reward-model":
        use = f"next     reward: {{rewards: [{{model: {result}}}]}}  # in a run, or for `polyreme reward test`"
    else:
        use = f"next     polyreme chat {quote(str(config.run_dir))}  # ask the model; in a run: model.path={result}"
    return [use, f"         polyreme ui {quote(str(config.run_dir))}  # its curves"]
