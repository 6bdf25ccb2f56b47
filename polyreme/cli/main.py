"""The `polyreme` command.

Services add subcommands through the entry-point group `polyreme.commands`. Each is a function with typer annotations.

Invariant: only the subcommand on the command line is imported, so `polyreme --help` is fast. It lists the installed subcommands.
"""

import ast
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from polyreme import API_VERSION
from polyreme.process.lifecycle import exit_at_once_on_sigterm, exit_on_error
from polyreme.process.prompt_exit import prompt_exit
from polyreme.process.quick_imports import quick_imports

COMPLETING = "_POLYREME_COMPLETE"
"""The variable by which a shell asks for completions."""


_CORE = {
    "up": "Train: start every service of a run on this machine and watch it.",
    "init": "Write the files of a first run: run.yaml, a reward, sample data. Ask five questions, or none with flags.",
    "eval": "Evaluate a model on a run's held-out prompts with its rewards, without training.",
    "audit": "Account for every group of a run's experience log.",
    "doctor": "Check this machine: versions, devices, collectives, shared memory, Redis, ports, sandbox, disk.",
    "ui": "Show runs in a web page: curves, samples, timeline, servers, alarms.",
    "import-config": "Write a run.yaml from the configuration of verl, MindSpeed RL, TRL, OpenRLHF or PaddleNLP.",
    "upgrade-config": "Write the configuration of an older version in today's keys, and say what changed.",
    "report": "Write one offline HTML file that compares runs.",
    "config": "Show or check a run's configuration.",
    "status": "List runs: state, iteration, newest result, replicas, and why a run ended.",
    "chat": "Talk to the policy of a run or a stage, live or exported, or to a model directory.",
    "gateway": "Serve one OpenAI-compatible /v1 for all replicas of a run.",
    "logs": "Print the log lines of a run's processes, by time.",
    "samples": "Show samples of a run, filtered by iteration, reward, length and text.",
    "compare": "Compare runs: keys of the configuration that differ, results, and metrics over the same iterations.",
}
"""The line of help of each subcommand of the core."""
_ELSEWHERE = {
    "eval": "cli.commands.evaluate:evaluate",
    "ui": "page.command:ui",
    "report": "page.report:report",
    "chat": "cli.chat.chat:chat",
}
"""The functions in this package that are not NAME in cli.commands.NAME."""


@dataclass(frozen=True)
class Command:
    """A subcommand that is imported on demand: a function, or a typer application with its own subcommands.

    Attributes:
        description: its line of help, or the entry point whose source has it.
    """

    name: str
    description: str | EntryPoint
    load: Callable[[], Callable[..., object] | typer.Typer]

    @property
    def help(self) -> str:
        """One line. Of an installed service, it is read and parsed now, which takes longer than the start of a command."""
        return self.description if isinstance(self.description, str) else _first_line(self.description)


@cache
def commands() -> tuple[Command, ...]:
    """The subcommands of the core, then those of the installed services. They do not change within a process."""
    places = {name: "cli.commands.{0}:{0}".format(name.replace("-", "_")) for name in _CORE} | _ELSEWHERE
    core = (Command(name, text, EntryPoint(name, f"polyreme.{places[name]}", "").load) for name, text in _CORE.items())
    return (*core, *(Command(point.name, point, point.load) for point in sorted(entry_points(group="polyreme.commands"))))


def build_app(argv: Sequence[str], completing: bool = False) -> typer.Typer:
    """The command line for `argv`. Imports the subcommand that it names. Without a name, and to complete one, the others are
    names with one line of help."""
    app = typer.Typer(name="polyreme", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_options)
    named = [command for command in commands() if list(argv[:1]) == [command.name]]
    for command in named:
        with quick_imports():
            loaded = command.load()
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=command.name)
        else:
            app.command(command.name)(loaded)
    for command in () if named and not completing else commands():
        if command not in named:
            app.command(command.name, help=command.help)(_not_imported)
    return app


def main() -> None:
    """Runs the command on the process's arguments. Prints a PolyremeError as one message and exits with its code."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character of another encoding must not end a run
    if sys.argv[1:2] in (["serve"], ["sampler"]):
        exit_at_once_on_sigterm()
    else:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # process 1 of a container ignores SIGTERM by default
    with prompt_exit(), exit_on_error("polyreme"):
        build_app(typed_words(sys.argv[1:], os.environ), COMPLETING in os.environ)(prog_name="polyreme")


def typed_words(argv: Sequence[str], environment: Mapping[str, str]) -> Sequence[str]:
    """The words after `polyreme`: the arguments, or the line of a shell that requests completions through `environment`."""
    if COMPLETING not in environment:
        return argv
    return (environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS") or "").split()[1:]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"polyreme {version('polyreme')} (API {API_VERSION})")
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models."""


def _not_imported() -> None:
    raise AssertionError("a subcommand other than the one on the command line cannot run")


def _first_line(point: EntryPoint) -> str:
    """The first line of a function's docstring, or a typer application's help. Reads the source: an import may take seconds."""
    package, *inside = point.module.split(".")
    spec = find_spec(package)
    [folder] = spec.submodule_search_locations or [] if spec else []
    source = Path(folder, *inside).with_suffix(".py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == point.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and ast.unparse(node.targets[0]) == point.attr:
            return next((ast.literal_eval(word.value) for word in node.value.keywords if word.arg == "help"), "")
    raise AssertionError(f"{point.value} is neither a function nor a typer application")
