"""Checks the command lines of a page against the real command line.

Invariant: nothing is executed. `polyreme` or `make` accepts every line that passes: its command, options, choices and keys exist.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal, get_args, get_origin

import typer.main
from typer.exceptions import TyperException

from polyreme.cli.main import build_app, commands
from polyreme.config.run import RunConfig
from polyreme.config.section import Section, known_keys
from polyreme.config.serve import ServeConfig
from polyreme.config.stage import STAGES
from support.guide import ROOT

_SEPARATORS = re.compile(r"[();&|]+$")
_KEYWORDS = {"do", "then", "if", "{", "!"}
_OVERRIDE = re.compile(r"([a-z][\w.]*)=")
_BUILTINS = {"cd", "export", "source", "kill", "mkdir", "for", "done", "wait"}


def simple_commands(script: str) -> Iterator[list[str]]:
    """The simple commands of a shell script, without redirections and leading assignments. `[...]` is an optional part of a synopsis."""
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(re.sub(r" \[[^]]*\]", "", line), posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if _SEPARATORS.match(word):
                if words := _without_assignments(_without_redirections(words)):
                    yield words
                words = []
            elif words or word not in _KEYWORDS:
                words.append(word)


def problems(words: Sequence[str], files: Sequence[str] = ()) -> list[str]:
    """The problems of a simple command; `files` are the names of the page's own files."""
    match words:
        case ["polyreme", *rest]:
            return _of_polyreme(rest)
        case ["make", *targets]:
            known = re.findall(r"^([\w./$()-]+):", (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv"), re.MULTILINE)
            return [f"no target {target}" for target in targets if "=" not in target and target not in known]
        case ["python", file, *_] if file.endswith(".py"):
            return [] if file in files or (ROOT / file).is_file() else [f"no file {file}"]
        case [program, *_] if program in _BUILTINS:
            return []
    return [f"`{' '.join(words)}` is not compared with anything: write why above the block"]


def _of_polyreme(words: Sequence[str]) -> list[str]:
    """The problems that the command line of `polyreme` would report."""
    if not words or words[0].isupper() or words[0].startswith("--"):
        return []
    if words[0] not in {command.name for command in commands()}:
        return [f"no command {words[0]}"]
    if words[:2] == ["reward", "test"]:  # a subcommand after the service's command line
        return [] if words[2:] == [] or words[3:4] == ["--config"] else ["polyreme reward test FILE --config FILE"]
    command, rest = _command(words[0]), list(words[1:])
    while hasattr(command, "commands"):
        if not rest or rest[0].startswith("-"):
            return []
        if rest[0] not in command.commands:
            return [f"no command {rest[0]} in {command.name}"]
        command = command.commands[rest.pop(0)]
    context = command.context_class(command, info_name=command.name)
    try:
        values, extra, _ = command.make_parser(context).parse_args(rest)
    except TyperException as error:
        return [f"{type(error).__name__}: {error}"]
    found = [f"an argument too many: {extra}"] if extra and not command.allow_extra_args else []
    for option in command.params:
        value = values.get(option.name)
        choices = _choices(option.type_descriptor.annotation)
        if choices and isinstance(value, str) and not value.isupper() and value not in choices:
            found.append(f"{option.opts[0]} is one of {choices}, not {value}")
        if option.name == "overrides":
            found += [f"no key {word}" for word in value or () if not _is_override(word)]
    return found


def _is_override(word: str) -> bool:
    match = _OVERRIDE.match(word)
    return word in {"KEY=VALUE", "..."} or (match is not None and match[1] in _keys())


def _choices(annotation: Any) -> list[str]:
    """The values that a parameter of this type accepts; empty if it accepts any."""
    if isinstance(annotation, type):
        return [member.value for member in annotation] if issubclass(annotation, Enum) else []
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for part in get_args(annotation) for choice in _choices(part)]


@cache
def _keys() -> set[str]:
    schemas: list[type[Section]] = [RunConfig, ServeConfig, *STAGES.values()]
    return {key for schema in schemas for key in known_keys(schema)}


@cache
def _command(name: str) -> Any:
    app: Any = typer.main.get_command(build_app([name]))
    return app.commands[name]


def _without_assignments(words: list[str]) -> list[str]:
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    return words


def _without_redirections(words: list[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or re.fullmatch(r"\d?[<>]+", word):
            skip = not skip
        else:
            kept.append(word)
    return kept
