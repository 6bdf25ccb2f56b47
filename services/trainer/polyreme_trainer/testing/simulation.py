"""`python -m polyreme_trainer.testing.simulation`: the trainer of an existing run, with the simulated learner.

Invariant: supervision, records and orchestrator are those of `polyreme train`; only the learner's training is simulated.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from polyreme.experience.listing import attached
from polyreme.net.redis_url import redis_option
from polyreme.process import logging_setup
from polyreme.process.lifecycle import exit_on_error
from polyreme_trainer.launch.trainer_process import Trainer, trainer_processes
from polyreme_trainer.observe.exporter import export

_ATTACH_SECONDS = 10.0


def simulation(
    log_dir: Annotated[Path, typer.Option(help="Directory of the children's logs.")],
    redis: Annotated[str, redis_option("URL of the run's Redis.")],
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id; without it, the newest run.")] = None,
    train_seconds: Annotated[float, typer.Option(min=0, help="Seconds that the training of an iteration takes.")] = 0.1,
    weight_bytes: Annotated[int, typer.Option(min=64, help="Size of a version.")] = 64,
    http_port: Annotated[
        int | None, typer.Option(min=1, help="Port of metrics and run page; without it, none is served.")
    ] = None,
) -> None:
    """Supervises the orchestrator and the simulated learner to the run's end, without training."""
    logging_setup.setup("train")
    log_dir.mkdir(parents=True, exist_ok=True)
    with exit_on_error("train"):
        options = ("--train-seconds", str(train_seconds), "--weight-bytes", str(weight_bytes))
        asyncio.run(_train(redis, run, log_dir, options, http_port))


async def _train(redis_url: str, run_id: str | None, log_dir: Path, options: tuple[str, ...], http_port: int | None) -> None:
    async with attached(redis_url, run_id, _ATTACH_SECONDS) as run:
        config = await run.config()
        learner = ("-m", "polyreme_trainer.testing.simulated_learner", *options)
        async with export(run, config, "127.0.0.1", http_port):
            await Trainer(config, run, trainer_processes(config, run.run_id, redis_url, log_dir, learner)).run()


if __name__ == "__main__":
    typer.run(simulation)
