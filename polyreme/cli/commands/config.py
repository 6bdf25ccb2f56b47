"""`polyreme config`: shows or checks a run's configuration, and prints the reference of all keys.

Invariant: no subcommand starts a process or writes a file.
"""

from pathlib import Path
from typing import Annotated

import typer

from polyreme.config.describe import annotated_yaml, reference
from polyreme.config.load import load_any
from polyreme.display.summary import lines_of
from polyreme.errors import AbsentError
from polyreme.hub.resolve import resolve_names
from polyreme.rundir.checks import findings, memory_report, raise_all
from polyreme.terminal.completion import Overrides

ConfigFile = Annotated[Path, typer.Argument(help="The YAML file of a run or a stage.")]

config = typer.Typer(no_args_is_help=True, help="Show or check a run's configuration.")


@config.command("show")
def show(file: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved configuration with all defaults, and the description of each key as a comment."""
    print(annotated_yaml(load_any(file, overrides or ())), end="")


@config.command("check")
def check(
    file: ConfigFile,
    overrides: Overrides = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also print the estimated memory of the learner.")] = False,
    device_gib: Annotated[
        float | None,
        typer.Option(
            min=0, help="Memory of a device in GiB, which the estimate must fit; on CPU, the machine's.", show_default=False
        ),
    ] = None,
) -> None:
    """Check everything that can be checked before processes start, and print the run's summary. Downloads what it names."""
    resolved = resolve_names(load_any(file, overrides or ()))
    found = findings(resolved)
    lines, errors, absent = lines_of(resolved, found.notices), list(found.errors), list[str]()
    if memory or device_gib is not None:
        estimate = memory_report(resolved, None if device_gib is None else int(device_gib * 2**30))
        lines += estimate.notices
        # An estimate is made for a machine that may be another one. Without config.json there is none.
        absent = [f"missing        {error}" for error in errors if isinstance(error, AbsentError)]
        errors = [error for error in errors if not isinstance(error, AbsentError)]
        errors += [error for error in estimate.errors if str(error) not in map(str, errors)]
    print("\n".join([*lines, *absent]))
    raise_all(errors)
    print("checks         passed" + (", except what is missing here" if absent else ""))


@config.command("reference")
def print_reference() -> None:
    """Print the reference of all configuration keys as Markdown."""
    print(reference(), end="")
