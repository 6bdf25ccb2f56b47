"""`polyreme upgrade-config`: writes a configuration of an older version in today's keys.

Invariant: the file is written completely or not at all, and never replaces an existing one. Comments and the order of keys stay.
"""

import io
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
import yaml

from polyreme.config.load import parse_any
from polyreme.config.upgrade import upgrade
from polyreme.config.yaml_text import load_yaml
from polyreme.errors import ConfigError
from polyreme.rundir.run_records import check_new_file, write_atomically


def upgrade_config(
    file: Annotated[Path, typer.Argument(help="The YAML file of a run or a stage, for an older version.")],
    output: Annotated[Path | None, typer.Option(help="The file to write. Default: print it.", show_default=False)] = None,
    keep_defaults: Annotated[
        bool, typer.Option(help="Also write the defaults of 0.1.0 that have changed into a file that has no old key.")
    ] = False,
) -> None:
    """Write the configuration of an older version in today's keys, and say what changed."""
    if output is not None:
        check_new_file(output, "--output")
    try:
        old = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"a configuration file {file}", error.strerror or str(error), "Pass the path of a YAML file.") from None
    text, changes = upgraded_text(old, str(file), keep_defaults=keep_defaults)
    for change in changes or [
        f"{file}: no key of an older version. If 0.1.0 trained it, --keep-defaults writes the defaults that it had."
    ]:
        print(change, file=sys.stderr)
    parse_any(load_yaml(text, str(file)), file)
    if output is None:
        print(text, end="")
    else:
        write_atomically(output, text)
        print(f"{output}: written. Next: `polyreme config check {quote(str(output))}`.", file=sys.stderr)


def upgraded_text(text: str, source: str, *, keep_defaults: bool = False) -> tuple[str, list[str]]:
    """A YAML text with today's keys, and what was changed. `source` names it in errors. `keep_defaults`: see `upgrade`.

    Raises ConfigError: it is not a mapping in YAML.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 1 << 20
    editor.indent(mapping=2, sequence=4, offset=2)
    try:
        load_yaml(text, source)
        tree = editor.load(text)
    except (yaml.YAMLError, YAMLError) as error:
        raise ConfigError(f"YAML in {source}", str(error).replace("\n", " "), "Fix the file.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"a mapping of keys in {source}", type(tree).__name__, "Pass the YAML file of a run or a stage.")
    changes = upgrade(tree, keep_defaults=keep_defaults)
    if not changes:
        return text, []
    editor.dump(tree, written := io.StringIO())
    return written.getvalue(), changes
