"""The schema as text: a resolved configuration with comments, and the reference of all keys.

Invariant: every description, default and bound comes from the schema itself, so the texts cannot disagree with the code. Pure.
"""

import datetime
import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
import yaml
from pydantic.fields import FieldInfo

from polyreme.config.base import BaseConfig
from polyreme.config.run import RunConfig
from polyreme.config.section import Section, is_operational, subsections
from polyreme.config.serve import ServeConfig
from polyreme.config.stage import STAGES, StageTrainer

_WIDTH = 120
_PLAIN = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    Path: "path",
    datetime.date: "date, such as 2026-01-31",
}
_SIGNS = {annotated_types.Ge: "≥", annotated_types.Gt: ">", annotated_types.Le: "≤", annotated_types.Lt: "<"}
_HEAD = """# Configuration

*Generated from the schema by `polyreme config reference`; edit the descriptions in `polyreme/config/`.*

One YAML file configures a run. The command line can override any key: `polyreme up run.yaml trainer.optimizer.lr=1e-4`. \
A number selects
a row of a list: `reward.rewards.0.weight=0.5`. A relative path is resolved against the YAML file's folder, \
in an override against the
working directory. An unknown key is an error that suggests the nearest known key. `polyreme config show` prints the resolved
configuration. `polyreme config check` checks everything that can be checked before processes start.

Keys marked ○ are *operational*: they do not affect the trained weights, so a run may be resumed (`--resume`) with other values.
`iterations` counts as operational while the learning rate is constant.
"""

_STAGES_HEAD = """
## Stages

A [stage](../stages.md) has its own YAML file, whose key `stage` names it. \
`model`, `trainer.parallel` and `trainer.optimizer` have the same
keys as in a run; `optimizer.warmup` counts steps. The sources of `data.eval` have the keys of those of `data.train`. The length
(`trainer.steps`, `trainer.epochs`) counts as operational while the learning rate is constant.
"""

_SERVE_HEAD = """
## Training service

The file of [`polyreme serve`](../serve.md). `model` has the same keys as in a run.
"""


def annotated_yaml(config: BaseConfig) -> str:
    """The resolved configuration as YAML that reads back as `config`. Each key has its description and default as a comment."""
    return "\n".join(_section_lines(config, "")) + "\n"


def reference() -> str:
    """All keys of the schema as Markdown, with one table of type, default and description per section."""
    seen: dict[type[Section], str] = {}
    parts = [_HEAD, *_tables(RunConfig, "", seen), _STAGES_HEAD]
    for name, schema in STAGES.items():
        parts += _tables(schema, "", seen, f", stage {name}", without=("model", "trainer", "eval"))
    parts += _tables(StageTrainer, "trainer", seen, ", all stages", without=("parallel", "optimizer"))
    parts += [_SERVE_HEAD, *_tables(ServeConfig, "", seen, ", training service", without=("model",))]
    return "".join(parts)


def _section_lines(section: Section, indent: str, described: bool = True) -> Iterator[str]:
    plain = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        rows = value if isinstance(value, list | tuple) and value and all(isinstance(each, Section) for each in value) else ()
        if described:
            if not indent and subsections(field):
                yield ""
            yield from _comment(type(section), name, value, indent)
        if isinstance(value, Section):
            yield f"{indent}{name}:"
            yield from _section_lines(value, f"{indent}  ", described)
        elif rows:
            yield f"{indent}{name}:"
            for place, row in enumerate(rows):  # only the first row has comments
                yield f"{indent}  -"
                yield from _section_lines(row, f"{indent}    ", described and place == 0)
        else:
            yield f"{indent}{name}: {_flow(plain[name])}"


def _comment(section: type[Section], name: str, value: object, indent: str) -> list[str]:
    """The description of a field and, for a plain value, its type and default."""
    field = section.model_fields[name]
    if isinstance(value, Section):
        text = field.description or _doc(type(value))
    else:
        text = f"{_description(field)} ({_type(field)}; {_default(section, name)})".lstrip()
    return textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")


def _tables(
    section: type[Section],
    place: str,
    seen: dict[type[Section], str],
    suffix: str = "",
    variant: str = "",
    without: tuple[str, ...] = (),
) -> Iterator[str]:
    """The table of a section, then those of its subsections except the ones named in `without`. `suffix` ends every heading.

    Args:
        seen: the heading of each section's table, to which its other places refer: the first of the shallowest places.
    """
    heading = _heading(place, suffix, variant)
    yield f"\n## {heading}\n\n"
    if (first := seen.setdefault(section, heading)) != heading:
        yield f"The keys of {first}.\n"
        return
    if about := _doc(section):
        yield f"{about}\n\n"
    yield "| key | type | default | description |\n|---|---|---|---|\n"
    for name, field in section.model_fields.items():
        mark = " ○" if is_operational(field) else ""
        yield (
            f"| `{name}`{mark} | {_type(field)} | {_default(section, name).removeprefix('default ')} | {_description(field)} |\n"
        )
    inner = []
    for name, field in section.model_fields.items():
        kinds, listed = () if name in without else subsections(field), _lists(field.annotation)
        deeper = f"{place}{'.' if place else ''}{name}{'[]' if listed else ''}"
        inner += [(kind, deeper, f", {_name(kind)}" if len(kinds) > 1 else "") for kind in kinds]
    for kind, deeper, own in inner:
        seen.setdefault(kind, _heading(deeper, suffix, own))
    for kind, deeper, own in inner:
        yield from _tables(kind, deeper, seen, suffix, own, without)


def _heading(place: str, suffix: str, variant: str) -> str:
    return f"{f'`{place}`' if place else 'Top level'}{suffix}{variant}"


def _lists(annotation: object) -> bool:
    """Whether a list is among the values of a field."""
    return any(get_origin(each) in (list, tuple) for each in (annotation, *get_args(annotation)))


def _doc(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split()) if "__doc__" in vars(section) else ""


def _description(field: FieldInfo) -> str:
    inner = subsections(field)
    return field.description or (_doc(inner[0]) if len(inner) == 1 else "")


def _default(section: type[Section], name: str) -> str:
    """A key's default as text: `default 3`, `required`, `by preset`, or '' for a section whose keys all have defaults."""
    field = section.model_fields[name]
    if section.filled_by and name not in section.__annotations__:
        return f"by {section.filled_by}"
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if isinstance(value, Section) else "default none" if value is None else f"default {_flow(value)}"


def _flow(value: object) -> str:
    """A plain value in YAML's flow style, on one line."""
    plain = str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(plain, default_flow_style=True, allow_unicode=True, width=10_000).removesuffix("...\n").rstrip("\n")
    return json.dumps(plain) if "\n" in text else text  # JSON escapes line breaks, YAML does not


def _type(field: FieldInfo) -> str:
    """The values that a field accepts: its type, choices and bounds."""
    return " ".join([_kind(field.annotation), *_bounds(field.metadata)])


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        marks = [mark for each in arguments[1:] for mark in (each.metadata if isinstance(each, FieldInfo) else [each])]
        return " ".join([_kind(arguments[0]), *_bounds(marks)])
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return f"list of {_kind(arguments[0])}"
    if origin is tuple:
        return f"list of {', '.join(map(_kind, arguments))}"
    if origin is dict:
        return "mapping"
    if arguments:
        return " or ".join(_kind(each) for each in arguments if each is not type(None))
    return _name(annotation) if issubclass(annotation, Section) else _PLAIN[annotation]


def _name(section: type[Section]) -> str:
    """Name of a section: its `kind` when it has one."""
    kind = section.model_fields.get("kind")
    return f"kind {kind.default}" if kind else "section"


def _bounds(marks: Iterable[object]) -> Iterator[str]:
    for mark in marks:
        for kind, sign in _SIGNS.items():
            if isinstance(mark, kind):
                yield f"{sign} {getattr(mark, kind.__name__.lower()):g}"
