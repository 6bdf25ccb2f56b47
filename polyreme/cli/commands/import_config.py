"""`polyreme import-config`: writes a run.yaml from another system's configuration.

Invariant: the file is written completely or not at all, and never replaces an existing one. It is valid in our schema, or the
command fails with the reason. What was not carried over is on the terminal (stderr) as well as in the file. The status is 0 when
a file or text was written: losses are decisions of the user, not failures.
"""

import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
import yaml

from polyreme.config.load import parse_config
from polyreme.errors import ConfigError
from polyreme.import_config.render import report, text_of
from polyreme.import_config.systems import SYSTEMS, import_file
from polyreme.rundir.run_records import check_new_file, write_atomically
from polyreme.terminal.completion import one_of


def import_config(
    file: Annotated[Path, typer.Argument(help="YAML, JSON, a shell script with the command line, or a Python script of TRL.")],
    output: Annotated[Path | None, typer.Option(help="The run.yaml to write. Default: print it.", show_default=False)] = None,
    system: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(SYSTEMS)}; none: by the keys.", show_default=False, autocompletion=one_of(SYSTEMS)),
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows of the training data, for files that count passes.", show_default=False)
    ] = None,
) -> None:
    """Write a run.yaml from the configuration of verl, MindSpeed RL, TRL, OpenRLHF or PaddleNLP."""
    if system is not None and system not in SYSTEMS:
        raise ConfigError(f"--system {', '.join(SYSTEMS)}", system, "Choose one of these.")
    if output is not None:
        check_new_file(output, "--output")
    source, found = import_file(file, system, rows)
    for line in report(found, source.title):
        print(line, file=sys.stderr)
    text = text_of(found, source.title, str(file))
    parse_config(yaml.safe_load(text), f"the import of {file}")
    if output is None:
        print(text, end="")
    else:
        write_atomically(output, text)
        decide = "decide on the lists above, which are at its top, then " if found.lost or "CHECK" in text else ""
        print(f"{output}: {len(found.values)} keys. Next: {decide}`polyreme config check {quote(str(output))}`.", file=sys.stderr)
