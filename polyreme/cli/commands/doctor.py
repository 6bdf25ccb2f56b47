"""`polyreme doctor`: checks what this machine offers a run, and states how to fix what is missing.

Invariant: the command measures and reports. Servers and processes that it starts end with it; only the file of --report outlasts
it. That file has no secret that this process knows: values of secret variables of the environment, the password of the run's
Redis, and of an address nothing but scheme, host and port. Samples, data and answers are not read.
"""

import asyncio
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Annotated, Literal

import httpx
import typer

from polyreme.errors import ConfigError, PolyremeError
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.store import connected
from polyreme.hub.download import hub_address
from polyreme.net.ports import check_free, loopback
from polyreme.net.redis_url import exposure, redis_option
from polyreme.process.machine import memory_limit
from polyreme.process.temp_root import REPLICA_ROOM, temp_root
from polyreme.rundir.log_lines import log_files, newest_attempt
from polyreme.rundir.run_directory import no_run, read_run_file
from polyreme.rundir.run_records import check_new_file, write_atomically
from polyreme.terminal import verdicts as judge
from polyreme.weights.arena import shared_memory

GROUP = "polyreme.doctor"
_HUB_SECONDS = 3.0
SERVICES = {
    "polyreme-rollout": "rollout",
    "polyreme-reward": "reward",
    "polyreme-environment": "environment",
    "polyreme-trainer": "trainer",
}
LINES_OF_A_LOG = 60
_PACKAGES = re.compile(
    r"(polyreme|torch|vllm|megatron|mindspeed|transformers|tokenizers|numpy|grpcio|protobuf|redis|valkey|pydantic|flash|triton)"
)
_SECRET = re.compile(r"(TOKEN(?!IZ)|PASSWORD|SECRET|CREDENTIAL|_KEY$)")
_SHORTEST_SECRET = 4
"""Characters. A shorter value, such as `1`, would be replaced everywhere."""
_ADDRESS = re.compile(r"\b(\w+)://(?:[^\s/@'\"]*@)?([^\s/'\"]+)(/[^\s'\"]*)?")


def doctor(
    device: Annotated[
        Literal["cpu", "cuda", "npu"] | None,
        typer.Option(help="The device that runs will use. Default: those of this machine.", show_default=False),
    ] = None,
    redis: Annotated[str | None, redis_option("Redis to check. Default: the one that `polyreme up` would start.")] = None,
    port: Annotated[list[int] | None, typer.Option(help="A port that must be free; may be repeated.")] = None,
    directory: Annotated[Path, typer.Option(help="Where runs are written.")] = Path(),
    report: Annotated[
        Path | None,
        typer.Option(help="Also write what an issue needs to this file: versions, these lines, a run's configuration and logs."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Directory of the run that --report includes.")] = None,
) -> None:
    """Check this machine: versions, devices, collectives, shared memory, Redis, ports, sandbox, disk.
    Exits with 1 when a part is missing."""
    if not directory.is_dir():
        found = "a file" if directory.exists() else "nothing"
        raise ConfigError(f"a directory of runs at {directory}", found, "Fix --directory.")
    if run is not None and report is None:
        raise ConfigError("--report FILE beside --run", "none", "Name the file to write.")
    if report is not None:
        check_new_file(report, "--report")
    if run is not None and read_run_file(run) is None:
        raise no_run(run)
    verdicts = []
    for verdict in examine(device, redis, port or [], directory):
        print(verdict.line, flush=True)
        verdicts.append(verdict)
    if report is not None:
        write_atomically(report, report_text([verdict.line for verdict in verdicts], run, os.environ))
        print(f"wrote    {report}; read it before you share it: secrets are removed, paths and messages are not")
    raise typer.Exit(judge.exit_code(verdicts))


def examine(device: str | None, redis: str | None, ports: list[int], directory: Path) -> Iterator[judge.Verdict]:
    """Yields the verdicts on this machine as they are found. Arguments as for `doctor`."""
    yield judge.python_verdict((sys.version_info.major, sys.version_info.minor))
    installed = {name: judge.installed_version(name) for name in ("polyreme", *SERVICES)}
    yield judge.packages_verdict("polyreme", installed, "Install what this machine runs: pip install ./services/NAME.")
    yield judge.memory_verdict(memory_limit())
    yield judge.shared_memory_verdict(*shared_memory())
    yield judge.disk_verdict(str(directory.resolve()), shutil.disk_usage(directory).free)
    yield judge.temp_verdict(temp_facts())
    yield judge.hub_verdict(hub_address(), os.environ.get("HF_HOME", "~/.cache/huggingface"), hub_failure(hub_address()))
    yield judge.files_verdict(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield judge.clock_verdict(time.time())
    reached = loopback_or_failure()
    yield judge.loopback_verdict(*reached)
    if reached[0] is None:
        return  # no server could be reached
    yield judge.redis_verdict(redis or "started by `polyreme up`", redis_failure(redis), exposure(redis) if redis else "")
    for number in ports:
        yield judge.port_verdict(number, port_failure(number))
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        yield from point.load()(device)


def temp_facts() -> judge.TempFacts:
    """The facts about the directory of temporary files."""
    wanted = os.environ.get("TMPDIR", "")
    try:
        root = temp_root(REPLICA_ROOM)
    except PolyremeError:
        return judge.TempFacts(wanted, None)
    room = os.statvfs(root)
    return judge.TempFacts(
        wanted and os.path.abspath(wanted), str(root), room.f_bavail * room.f_frsize, bool(room.f_flag & os.ST_NOEXEC)
    )


def hub_failure(address: str) -> str | None:
    """Why no repository can be downloaded; None: the hub answers."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "offline mode (HF_HUB_OFFLINE)"
    try:
        httpx.head(address, timeout=_HUB_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"no answer ({error!s:.80})"
    return None


def loopback_or_failure() -> tuple[str | None, str]:
    """This machine's loopback address and '', or None and why there is none."""
    try:
        return loopback(), ""
    except PolyremeError as error:
        return None, error.found


def redis_failure(url: str | None) -> str | None:
    """Why a run cannot use the Redis at `url`, or an embedded one when `url` is None; None: it can."""

    async def reach(where: str) -> None:
        async with connected(where):
            pass

    try:
        if url is not None:
            asyncio.run(reach(url))
            return None
        with tempfile.TemporaryDirectory() as folder, EmbeddedServer.start(Path(folder)) as server:
            asyncio.run(reach(server.url))
    except PolyremeError as error:
        return str(error)
    return None


def port_failure(port: int) -> str | None:
    """Why a server cannot listen on the port on all addresses; None: it can."""
    try:
        check_free("0.0.0.0", port)
    except PolyremeError as error:
        return error.do
    return None


def report_text(verdicts: Sequence[str], run_dir: Path | None, environment: Mapping[str, str]) -> str:
    """Returns the text of the report.

    Args:
        verdicts: the lines of `polyreme doctor`.
        run_dir: the run whose configuration and logs are included, or None.
        environment: of this process; its names that begin with POLYREME_ are listed, without values.
    """
    parts = [
        ("system", [platform.platform(), f"Python {platform.python_version()}"]),
        ("packages", packages()),
        ("variables", sorted(name for name in environment if name.startswith("POLYREME_"))),
        ("doctor", verdicts),
    ]
    if run_dir is not None:
        parts += list(_of_run(run_dir))
    text = "\n".join(f"== {title}\n" + "".join(f"{line}\n" for line in lines) for title, lines in parts)
    return without_secrets(text, secrets_in(run_dir, environment))


def packages() -> list[str]:
    """The installed packages that computations and services depend on, with their versions."""
    found = {f"{found.name} {found.version}" for found in distributions() if _PACKAGES.match(found.name.lower())}
    return sorted(found)


def secrets_in(run_dir: Path | None, environment: Mapping[str, str]) -> list[str]:
    """The secrets that this process can know, longest first."""
    known = [value for name, value in environment.items() if _SECRET.search(name.upper())]
    password = run_dir / "redis" / "password" if run_dir is not None else None
    if password is not None and password.is_file():
        known.append(password.read_text().strip())
    return sorted((value for value in known if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)


def without_secrets(text: str, secrets: Sequence[str]) -> str:
    """The text without the secrets, and with addresses cut to scheme, host and port: a webhook's path is a secret."""
    for secret in secrets:
        text = text.replace(secret, "(removed)")
    return _ADDRESS.sub(lambda match: f"{match[1]}://{match[2]}" + ("/(removed)" if len(match[3] or "") > 1 else ""), text)


def _of_run(run_dir: Path) -> Iterator[tuple[str, Sequence[str]]]:
    for name in ("config.yaml", "summary.json"):
        path = run_dir / name
        yield name, path.read_text("utf-8", "replace").splitlines() if path.is_file() else [f"not in {run_dir}"]
    with suppress(ConfigError):  # a run that failed before its first process has no logs
        for file in log_files(newest_attempt(run_dir)):
            yield f"the last lines of {file.process}", [line.text for line in deque(file.read(), LINES_OF_A_LOG)]
