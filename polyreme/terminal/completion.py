"""Values that a shell completes on the command line.

Invariant: each function returns at once; it reads the schema and no file.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin

import typer

from polyreme.config.run import RunConfig
from polyreme.config.section import Section, known_keys, subsections
from polyreme.config.stage import STAGES


def one_of(values: Iterable[str]) -> Callable[[str], list[str]]:
    """The completion of an option with fixed values."""
    choices = tuple(values)
    return lambda incomplete: [value for value in choices if value.startswith(incomplete)]


def config_keys(incomplete: str, schema: type[Section] = RunConfig) -> list[str]:
    """The configuration's dotted keys that start with the typed text, each as the start of an override."""
    return [f"{key}=" for key in dict.fromkeys(known_keys(schema)) if key.startswith(incomplete)]


def config_values(key: str, schema: type[Section] = RunConfig) -> list[str]:
    """The values of a dotted key that accepts only some, such as the name of a preset; empty for any other key."""
    *parents, last = (part for part in key.split(".") if not part.isdigit())
    sections: list[type[Section]] = [schema]
    for parent in parents:
        sections = [
            inner for section in sections if parent in section.model_fields for inner in subsections(section.model_fields[parent])
        ]
    found = [section.model_fields[last] for section in sections if last in section.model_fields]
    values = list(dict.fromkeys(value for field in found for value in field.examples or _values(field.annotation)))
    return [] if values == ["null"] else values


def _values(annotation: object) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (_as_yaml(value) for value in get_args(annotation))
    elif annotation is bool:
        yield from ("true", "false")
    elif annotation is NoneType:
        yield "null"
    elif get_origin(annotation) not in (list, tuple, dict):
        for inner in get_args(annotation):
            yield from _values(inner)


def _as_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def completes_overrides(schema: type[Section]) -> Callable[[typer.Context, str], list[str]]:
    """The completion of `key=value` arguments: keys, and the values of keys that accept only some."""

    def complete(context: typer.Context, incomplete: str) -> list[str]:
        choices = partial(config_values, schema=schema)
        before = [str(word) for word in context.params.get("overrides") or []]
        key, equals, begun = incomplete.partition("=")
        if not equals and before[-1:] == ["="]:  # bash splits words at "=", and completes what follows it
            return one_of(choices(before[-2] if len(before) > 1 else ""))(key)
        if not incomplete and before and f"{before[-1]}=" in config_keys(before[-1], schema):
            return choices(before[-1])  # the same right behind the "="
        if equals:
            return [f"{key}={value}" for value in one_of(choices(key))(begun)]
        return config_keys(incomplete, schema)

    return complete


_HELP = "Override as key=value, such as trainer.optimizer.lr=1e-4."
Overrides = Annotated[list[str] | None, typer.Argument(help=_HELP, autocompletion=completes_overrides(RunConfig))]
"""The overrides of a command that reads the configuration of a run."""
SftOverrides = Annotated[list[str] | None, typer.Argument(help=_HELP, autocompletion=completes_overrides(STAGES["sft"]))]
RewardModelOverrides = Annotated[
    list[str] | None, typer.Argument(help=_HELP, autocompletion=completes_overrides(STAGES["reward-model"]))
]
DpoOverrides = Annotated[list[str] | None, typer.Argument(help=_HELP, autocompletion=completes_overrides(STAGES["dpo"]))]
"""The overrides of a stage."""
