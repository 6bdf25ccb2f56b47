"""Base class and inspection of configuration sections.

Invariant: every property of a field is declared on the field. Its type decides how it is read (a `Path` is resolved against the
YAML file's folder), and the mark `Operational` states that it does not affect the trained weights, except by rounding.
"""

import os
import re
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, field_validator, model_validator
from pydantic.fields import FieldInfo

Value = TypeVar("Value")


def _kept(value: object) -> object:
    """The value of a field. Raises ValueError for what no file name, message or record holds; sections check their own fields."""
    if isinstance(value, list | tuple | Mapping):
        for each in (*value, *value.values()) if isinstance(value, Mapping) else value:
            _kept(each)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("Input should be an integer of at most 64 bits")
    elif isinstance(value, str | Path) and re.search(r"[\0\ud800-\udfff]", str(value)):
        raise ValueError("Input should be text without NUL and without halves of UTF-16 characters")
    elif isinstance(value, Path) and (len(name := os.fsencode(value)) > 4095 or max(map(len, name.split(b"/"))) > 255):
        raise ValueError("Input should be a path of at most 4095 bytes, with at most 255 between two slashes")
    return value


class _OperationalMark:
    """The mark behind `Operational`."""


Operational = Annotated[Value, _OperationalMark()]
"""`Operational[int]` is an int that affects the trained weights only by rounding, so a run may resume with another value."""


class Section(BaseModel):
    """One mapping of the YAML file. Unknown keys are errors, and so are values that could only be read as something else: true
    and false are no numbers, and a number is no date.

    Attributes:
        filled_by: the key that provides the defaults of inherited fields, or None when the schema does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    filled_by: ClassVar[str | None] = None

    _checks_every_field = field_validator("*")(_kept)

    @model_validator(mode="before")
    @classmethod
    def _mark_misread(cls, given: object) -> object:
        if not isinstance(given, Mapping):
            return given
        fields = cls.model_fields
        return {key: _marked(value, fields[key]) if key in fields else value for key, value in given.items()}


def subsections(field: FieldInfo) -> list[type[Section]]:
    """Section types that a field accepts, also optionally or in a list: several for a union by `kind`, none for a plain value."""
    return [kind for kind in _kinds(field.annotation) if isinstance(kind, type) and issubclass(kind, Section)]


def holds_path(field: FieldInfo) -> bool:
    """Whether a field accepts a path."""
    return any(kind is Path for kind in _kinds(field.annotation))


def words(field: FieldInfo) -> set[str]:
    """The words that a field accepts, also in a list."""
    return {kind for kind in _kinds(field.annotation) if isinstance(kind, str)}


def is_operational(field: FieldInfo) -> bool:
    """Whether a field is marked `Operational`."""
    return any(isinstance(mark, _OperationalMark) for mark in field.metadata)


def required_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """The dotted keys without a default that a section needs, including those of the subsections that it needs."""
    for name, field in section.model_fields.items():
        if field.is_required():
            inner = subsections(field)
            yield from required_keys(inner[0], f"{prefix}{name}.") if inner else (prefix + name,)


def known_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Every dotted key of a section, including those of its subsections."""
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = (key for section in subsections(field) for key in known_keys(section, f"{prefix}{name}."))
        yield from dict.fromkeys(inner)


def without_operational(section: Section) -> dict[str, object]:
    """The section as JSON-compatible values, without its operational fields."""
    plain = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        if is_operational(field):
            del plain[name]
        elif subsections(field):
            value = getattr(section, name)
            if isinstance(value, Section):
                plain[name] = without_operational(value)
            elif isinstance(value, list | tuple):
                plain[name] = [
                    without_operational(each) if isinstance(each, Section) else same
                    for each, same in zip(value, plain[name], strict=True)
                ]
    return plain


def _kinds(annotation: object) -> Iterator[object]:
    """A type and, recursively, the arguments of a union, list or other generic."""
    yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _kinds(inner)


class _Misread:
    """Stands for a value that pydantic would take for one of another type, so that the field's own error names it."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        return str(self._value).lower()


def _marked(value: object, field: FieldInfo) -> object:
    """The value; misread ones, also in a list, are marked. true and false would become 1 and 0, a number a time since 1970."""
    if isinstance(value, list | tuple):
        return [_marked(each, field) for each in value]
    kinds = set(_kinds(field.annotation))
    if isinstance(value, bool) and not kinds & {bool, Any}:
        return _Misread(value)
    is_number = isinstance(value, int | float) or (isinstance(value, str) and "-" not in value)
    return _Misread(value) if date in kinds and is_number else value
