"""The `polyreme` command. A subcommand is imported when it is the one asked for, and only then.

Services add theirs through the entry-point group `polyreme.commands`: a function with typer annotations. So `polyreme --help` is
fast, and shows what is installed in this image.
"""

import ast
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import typer

from polyreme.process.lifecycle import exit_on_error


@dataclass(frozen=True)
class Command:
    """A subcommand that is not imported yet."""

    name: str
    help: str
    load: Callable[[], Callable[..., Any]]


def commands() -> list[Command]:
    """The core's own subcommands, then those of the services installed here."""
    found = [
        Command(
            "up", "Train: start every service of a run on this machine and watch it.", lambda: _attribute("polyreme.cli.up", "up")
        ),
        Command("audit", "Account for every group of a run's experience log.", lambda: _attribute("polyreme.cli.audit", "audit")),
    ]
    for point in sorted(entry_points(group="polyreme.commands")):
        found.append(Command(point.name, _first_line(point), point.load))
    return found


def build_app(argv: Sequence[str]) -> typer.Typer:
    """The command line for `argv`: the subcommand it names is imported, the others are names with a line of help."""
    app = typer.Typer(
        name="polyreme",
        help="Reinforcement-learning post-training of language models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in commands():
        if list(argv[:1]) == [command.name]:
            app.command(command.name)(command.load())
        else:
            app.command(command.name, help=command.help)(_not_imported)
    return app


def main() -> None:
    """Runs the command of this process's arguments. An error its user can act on is one message and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what a terminal cannot show ends no run
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else it would not end a container's first process
    with exit_on_error("polyreme"):
        build_app(sys.argv[1:])(prog_name="polyreme")


def _not_imported() -> None:
    raise AssertionError("a subcommand other than the one on the command line cannot run")


def _first_line(point: EntryPoint) -> str:
    """Of a function's docstring, read from the source: importing it may take seconds."""
    package, *inside = point.module.split(".")
    spec = find_spec(package)
    [folder] = spec.submodule_search_locations or [] if spec else []
    source = Path(folder, *inside).with_suffix(".py").read_text()
    [function] = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == point.attr]
    return (ast.get_docstring(function) or "").partition("\n")[0]


def _attribute(module: str, name: str) -> Any:
    return getattr(import_module(module), name)
