"""Values that a shell completes on the command line.

Invariant: each function returns at once; it reads the schema and no file.
"""

from typing import Annotated

import typer

from polyreme.config.run import RunConfig
from polyreme.config.section import known_keys


def config_keys(incomplete: str) -> list[str]:
    """The configuration's dotted keys that start with the typed text, each as the start of an override."""
    return [f"{key}=" for key in dict.fromkeys(known_keys(RunConfig)) if key.startswith(incomplete)]


Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Override as key=value, such as trainer.optimizer.lr=1e-4.", autocompletion=config_keys),
]
"""The overrides of a command that reads a configuration."""
