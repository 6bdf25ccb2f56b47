"""A tool's JSON schema, from the signature and docstring of its method.

    def multiply(self, a: int, b: int = 2) -> int:
        \"\"\"Multiplies two numbers.

        Args:
            a: the first one.
            b: the second one.
        \"\"\"

Invariant: the schema is the one that `transformers.utils.get_json_schema` makes of the same method, where that function accepts
it, without `return`. A tool that cannot be described completely is refused. Pure.
"""

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyreme.errors import ConfigError

Schema = dict[str, Any]

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", dict: "object", list: "array"}
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Yields|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^ *\**(\w+)(?: *\([^)\n]*\))?:[ \t]*")


def tool_schema(tool: Callable[..., object], name: str, where: str) -> Schema:
    """{type: function, function: {name, description, parameters}}. `where` names the file in errors.

    Raises:
        ConfigError: no docstring, or an argument without a type that JSON has, or without a description.
    """
    what = f"the tool {name} in {where}"
    about, described = _docstring(inspect.getdoc(tool) or "")
    if not about:
        raise ConfigError(f"a docstring that says what {what} does", "none", "Write one.")
    try:
        hints = typing.get_type_hints(tool)
    except Exception as error:  # noqa: BLE001 an annotation is code that may raise anything
        raise ConfigError(f"types of the arguments of {what}", f"{type(error).__name__}: {error}", "Fix its signature.") from None
    properties, required = {}, []
    for argument in _arguments(tool, what):
        key = argument.name
        if key not in hints:
            raise ConfigError(f"a type for the argument {key} of {what}", "none", "Annotate it, such as `a: int`.")
        if key not in described:
            raise ConfigError(f"a description of the argument {key} of {what}", "none", f"Write `{key}: ...` under `Args:`.")
        try:
            properties[key] = {**_type(hints[key]), "description": described[key]}
        except TypeError as error:
            raise ConfigError(
                f"a type that JSON has, for the argument {key} of {what}", str(error), "Use another type."
            ) from None
        if argument.default is inspect.Parameter.empty:
            required.append(key)
    parameters: Schema = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _arguments(tool: Callable[..., object], what: str) -> list[inspect.Parameter]:
    found = [each for each in inspect.signature(tool).parameters.values() if each.name != "self"]
    for each in found:
        if each.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise ConfigError(f"arguments with names in {what}", str(each), "Write each argument by itself.")
    return found


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring in Google's style says of the function, and of each argument."""
    pieces = _SECTION.split(text)
    described: dict[str, str] = {}
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            described |= _described(inspect.cleandoc(body))
    return pieces[0].strip(), described


def _described(body: str) -> dict[str, str]:
    """The descriptions of a section, by argument. Lines that are indented continue a description."""
    found: dict[str, list[str]] = {}
    key = None
    for line in body.splitlines():
        if (match := _ARGUMENT.match(line)) and not line.startswith(" "):
            key = match[1]
            found[key] = [line[match.end() :].strip()]
        elif key is not None and line.strip():
            found[key].append(line.strip())
    return {name: " ".join(lines).strip() for name, lines in found.items()}


def _type(hint: object) -> Schema:
    """The schema of a type. Raises TypeError when JSON has none."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin is typing.Literal:
        return _literal(arguments)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments)
    if origin in (list, Sequence):
        return {"type": "array", "items": _type(arguments[0])}
    if origin in (dict, Mapping) and arguments[0] is str:
        values = _type(arguments[1])
        return {"type": "object", "additionalProperties": values} if values else {"type": "object"}
    raise TypeError(f"{hint!r:.80}")


def _literal(values: Sequence[object]) -> Schema:
    kinds = {type(value) for value in values}
    if len(kinds) != 1 or not kinds <= {str, int, float, bool}:
        raise TypeError(f"the values {list(values)!r:.80} of several types")
    return {**_type(kinds.pop()), "enum": list(values)}


def _union(members: Sequence[object]) -> Schema:
    found = [_type(member) for member in members if member is not type(None)]
    nullable = {"nullable": True} if type(None) in members else {}
    if len(found) == 1:
        return {**found[0], **nullable}
    if all(each.keys() == {"type"} for each in found):
        names = sorted({each["type"] for each in found})
        return {"type": names[0] if len(names) == 1 else names, **nullable}
    return {"anyOf": found, **nullable}
