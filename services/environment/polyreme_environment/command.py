"""`polyreme environment` serves the environments of a run. `polyreme environment test FILE` plays one episode of it.

Invariant: after the first signal the server drains before it ends.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from polyreme.config.data import Sources
from polyreme.config.environment import EnvironmentConfig
from polyreme.config.load import load_config
from polyreme.config.run import RunConfig
from polyreme.dataset.chat import read_prompt
from polyreme.dataset.columns import TokenIds, value_at
from polyreme.dataset.source import read_objects
from polyreme.errors import ConfigError, DataError
from polyreme.net.endpoint import Advertise, Endpoint, Host, HttpPort, Port, endpoint_of
from polyreme.net.redis_url import redis_option
from polyreme.process import logging_setup
from polyreme.process.event_loop import run_service, stay
from polyreme.process.lifecycle import until_set
from polyreme.rundir.run_records import write_atomically

logger = logging.getLogger(__name__)


def environment(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[test run.yaml | tasks run.yaml [KEY=VALUE]...]",
            help="`test`: play one episode, print it, and exit. `tasks`: write the tasks of an environment of verifiers or NeMo"
            " Gym to data.train.",
        ),
    ] = None,
    redis: Annotated[str | None, redis_option("URL of the run's Redis.")] = None,
    run: Annotated[str | None, typer.Option(envvar="POLYREME_RUN", help="Run id. Default: the newest run.")] = None,
    host: Host = None,
    port: Port = 0,
    http_port: HttpPort = 0,
    advertise: Advertise = None,
    wait: Annotated[float, typer.Option(envvar="POLYREME_WAIT", min=0, help="Maximum seconds to wait for the run.")] = 60.0,
    count: Annotated[int, typer.Option(min=1, help="tasks: maximum number of tasks.")] = 10_000,
    row: Annotated[int, typer.Option(min=1, help="test: number of the row of the data, from 1.")] = 1,
    url: Annotated[
        str | None,
        typer.Option(help="test: an OpenAI-compatible address, such as http://HOST:PORT/v1. Default: you type the answers."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="test: name of the model at --url. Default: the first that it serves.")
    ] = None,
    held_out: Annotated[
        str,
        typer.Option("--set", help="test, tasks: the set of eval_sets whose environment it is. Default: the run's environment."),
    ] = "",
) -> None:
    """Play the episodes of a run's environments over gRPC."""
    if words and words[0] == "tasks" and len(words) > 1:
        _tasks(Path(words[1]), words[2:], count, held_out)
        return
    if words:
        asyncio.run(_test(words, row, url, model, held_out))
        return
    logging_setup.setup("environment")
    if redis is None:
        raise ConfigError("--redis URL", "none", "Pass the run's Redis, or `test run.yaml` to play an episode without a run.")
    run_service(_serve(redis, run, partial(endpoint_of, host, port, http_port, advertise), wait))


def _section(config: RunConfig, file: Path, held_out: str) -> tuple[EnvironmentConfig, Sources]:
    """An environment by the name of its set, and the data that it plays. Raises ConfigError."""
    if (section := config.environments.get(held_out)) is None:
        where = f"of the set {held_out} in {file}" if held_out else f"in {file}"
        raise ConfigError(f"a section `environment` {where}", "none", "Add it.")
    return section, config.played_data(held_out)[0]


def _tasks(file: Path, overrides: list[str], count: int, held_out: str) -> None:
    from polyreme_environment.nemo_gym.tasks import read_rows
    from polyreme_environment.verifiers.tasks import read_tasks

    config = load_config(file, overrides)
    settings, out = _section(config, file, held_out)
    if settings.venv is None:
        raise ConfigError(
            f"an environment of verifiers or NeMo Gym in {file}", "another one", "Its tasks are rows that you write."
        )
    if not isinstance(out, Path) or out.exists():
        key = "the set's data" if held_out else "data.train"
        raise ConfigError(f"a new file as {key} in {file}", f"{out}", f"Move it away, or fix {key}.")
    rows = read_tasks(settings, count) if settings.verifiers is not None else read_rows(settings, count)
    if not rows:
        raise ConfigError("tasks of the environment", "none", "Choose another environment, or fix environment.options.")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {len(rows)} tasks to {out}")


async def _test(words: list[str], row: int, url: str | None, model: str | None, held_out: str) -> None:
    from polyreme_environment import environment_test as test

    test.check_test(words)
    config = load_config(Path(words[1]))
    settings, data = _section(config, Path(words[1]), held_out)
    chosen = test.chosen_row([fields for _, fields in islice(read_objects(data), row)], row)
    prompt = read_prompt(value_at(chosen, config.data.prompt_key), f"{config.data.prompt_key!r} of row {row}")
    if isinstance(prompt, TokenIds):
        raise DataError("a prompt of text or messages", "tokens", "Choose another row.")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt.messages]
    limit = config.rollout.max_new_tokens
    async with nullcontext(test.typed) if url is None else test.asked(url, model, settings.tool_parser, limit) as policy:
        episode = await test.play(settings, chosen, messages, policy, print)
    print(f"ended    {episode.ended}; reward {episode.reward:g}")
    if episode.failed:
        raise typer.Exit(1)


async def _serve(redis: str, run_id: str | None, endpoint_towards: Callable[[str | None], Endpoint], wait: float) -> None:
    from polyreme.experience.listing import service_run
    from polyreme.isolation.privacy import refuse_inspection
    from polyreme_environment.server import hosted_by, serve_all

    refuse_inspection()  # memory and environment contain the run's password and token
    async with service_run(redis, run_id, wait) as (run, stop), until_set(stop):
        config = await run.config()
        if hosted := hosted_by(config):
            async with serve_all(hosted, endpoint_towards(redis), run, group_size=config.group_size) as lease:
                await stay(lease.address, lease.http_address)
        elif run_id is not None:
            raise ConfigError(f"a section `environment` in run {run.run_id}", "none", "Start no environment service for it.")
        else:
            # A container starts before it knows the run, and would be restarted for ever.
            logger.info("run %s has no environment; waiting for its end", run.run_id)
            await stop.wait()
