"""`polyreme logs`: the log lines of a run's processes in one stream.

Invariant: `--follow` ends with the run: when no process owns its directory, the rest is printed and the command returns.
"""

import sys
import time
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from polyreme.errors import ConfigError
from polyreme.rundir.log_lines import in_order, log_files, newest_attempt, printed
from polyreme.rundir.service_status import is_running
from polyreme.terminal.terminal import TerminalConsole

_POLL_SECONDS = 0.5
_AT_ONCE = 1000
"""Lines that are printed together."""


def logs(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run or a stage.")],
    process: Annotated[str, typer.Argument(help="A process such as rollout-0, or a service such as rollout. Default: all.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help="Only this many of the newest lines. Default: all of them.")] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Number of a start. Default: the newest.")] = None,
) -> None:
    """Print the log lines of a run's processes, by time."""
    folder = newest_attempt(run_dir) if attempt is None else run_dir / "logs" / f"attempt_{attempt}"
    if not folder.is_dir():
        raise ConfigError(f"logs at {folder}", "no such folder", f"The newest start is {newest_attempt(run_dir).name}.")
    console = TerminalConsole(sys.stdout)
    files = {file.path: file for file in log_files(folder, process)}
    while True:
        over = not follow or not is_running(run_dir)  # checked before the files are read, so that their last lines are printed
        files = {file.path: files.get(file.path, file) for file in log_files(folder, process)}
        lines = in_order(files.values())
        shown = printed(
            lines if tail is None else iter(deque(lines, tail)),
            max(map(len, (file.process for file in files.values())), default=0),
        )
        tail = None
        while part := list(islice(shown, _AT_ONCE)):
            console.print("\n".join(part), soft_wrap=True)
            if console.quiet:  # the reader of the output has gone
                return
        if over:
            return
        time.sleep(_POLL_SECONDS)
