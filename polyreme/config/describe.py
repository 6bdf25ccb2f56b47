"""The schema in words: a resolved configuration with its comments, and the reference of all keys.

Invariant: every word comes from the schema itself, so neither text can say what the code does not do. Pure.
"""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from polyreme.config.run import RunConfig
from polyreme.config.section import Section, holds_path, is_operational, subsections

_WIDTH = 120
_HEAD = """# Configuration

*Generated from the schema by `polyreme config reference`; edit the descriptions in `polyreme/config/`.*

A run is one YAML file. Any key can be overridden on the command line: `polyreme up run.yaml trainer.optimizer.lr=1e-4`; rows of a list
go by number: `reward.rewards.0.weight=0.5`. Relative paths are taken from the YAML file's folder, in overrides from the working
directory. An unknown key is an error that names the nearest one. `polyreme config show` prints a run's resolved configuration,
`polyreme config check` checks everything that can be checked before processes start.

A run may be resumed (`--resume`) with another value of an *operational* key (marked ○), as these do not decide the trained weights.
`iterations` counts as operational while the learning rate is constant.
"""


def annotated_yaml(config: RunConfig) -> str:
    """The resolved configuration as YAML that reads back as `config`. Each key has its description and default as a comment."""
    return "\n".join(_section_lines(config, "")) + "\n"


def reference() -> str:
    """All keys of the schema as Markdown: type, default, description; a table per section."""
    return _HEAD + "".join(_tables(RunConfig, ""))


def _section_lines(section: Section, indent: str, described: bool = True) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        value, inner = getattr(section, name), subsections(field)
        if described:
            if not indent and inner:
                yield ""
            yield from _comment(field, indent)
        if not inner or not value or isinstance(value, str):
            yield f"{indent}{name}: {_flow(value)}"
        elif isinstance(value, list | tuple):
            yield f"{indent}{name}:"
            for place, row in enumerate(value):
                yield from _row_lines(row, f"{indent}  ", described=place == 0)
        else:
            yield f"{indent}{name}:"
            yield from _section_lines(value, f"{indent}  ", described)


def _row_lines(row: Section, indent: str, described: bool) -> Iterator[str]:
    """A section as a row of a list; the comments of its keys stand at the first row."""
    yield f"{indent}-"
    yield from _section_lines(row, f"{indent}  ", described)


def _comment(field: FieldInfo, indent: str) -> list[str]:
    """What a field is, and for a plain value its type and default."""
    if inner := subsections(field):
        text = field.description or _doc(inner[0])
    else:
        text = f"{field.description} ({_type(field)}; {'required' if field.is_required() else f'default {_default(field)}'})"
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _tables(section: type[Section], prefix: str) -> Iterator[str]:
    variant = section.model_fields.get("kind")
    chosen = f", kind {variant.default}" if variant else ""
    yield f"\n## {f'`{prefix}`' if prefix else 'Top level'}{chosen}\n\n"
    if about := _doc(section):
        yield f"{about}\n\n"
    yield "| key | type | default | description |\n|---|---|---|---|\n"
    deeper = []
    for name, field in section.model_fields.items():
        inner, listed = subsections(field), get_origin(field.annotation) in (list, tuple)
        deeper += [(f"{prefix}{'.' if prefix else ''}{name}{'[]' if listed else ''}", each) for each in inner]
        kind = _type(field) if not inner else "list of sections" if listed else "section"
        default = "*required*" if field.is_required() else "" if inner and field.default is not None else f"`{_default(field)}`"
        words = field.description or (_doc(inner[0]) if len(inner) == 1 else "")
        yield f"| `{name}`{' ○' if is_operational(field) else ''} | {kind} | {default} | {words} |\n"
    for place, deeper_section in deeper:
        yield from _tables(deeper_section, place)


def _doc(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split())


def _default(field: FieldInfo) -> str:
    return "none" if field.default is None else _flow(field.default)


def _flow(value: Any) -> str:
    """A plain value as YAML on one line."""
    plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10_000).removesuffix("...\n").rstrip("\n")
    return json.dumps(plain) if "\n" in text else text  # YAML writes line breaks as such, JSON as escapes


def _type(field: FieldInfo) -> str:
    """The values that a field takes: its kind, choices and bounds."""
    kind = "path" if holds_path(field) else _kind(field.annotation)
    return " ".join([kind, *_bounds(field)])


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (list, tuple):
        return f"list of {_kind(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    if arguments := [kind for kind in get_args(annotation) if kind is not type(None)]:
        return " or ".join(map(_kind, arguments))
    return {str: "text", int: "integer", float: "number", bool: "true or false"}[annotation]


def _bounds(field: FieldInfo) -> Iterator[str]:
    for mark in field.metadata:
        for kind, sign in (
            (annotated_types.Ge, "≥"),
            (annotated_types.Gt, ">"),
            (annotated_types.Le, "≤"),
            (annotated_types.Lt, "<"),
        ):
            if isinstance(mark, kind):
                yield f"{sign} {getattr(mark, kind.__name__.lower()):g}"
