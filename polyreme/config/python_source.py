"""Finds, parses and loads a user's Python source, which is named by file or by module.

Invariant: only `load_module` runs user code; every other function reads text.
"""

import ast
import hashlib
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def find_source(module: str) -> Path | None:
    """The file of an importable module, or None when the module is not Python source. Does not import its parent packages.

    Raises:
        ConfigError: the module does not exist.
    """
    first, *inside = module.split(".")
    spec = find_spec(first)
    for depth in range(1, len(inside) + 1):
        if spec is None:
            break
        spec = PathFinder.find_spec(".".join([first, *inside[:depth]]), spec.submodule_search_locations)
    if spec is None:
        raise ConfigError(f"an importable module {module}", "no such module", "Install it, or fix `module`.")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def read_source(path: Path, fix: str) -> str:
    """The text of a Python file. Raises ConfigError, which says `fix`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"a Python file {path}", str(error), fix) from None


def digest_of(code: bytes) -> str:
    """The first 16 hexadecimal digits of a source's SHA-256."""
    return hashlib.sha256(code).hexdigest()[:16]


def load_module(path: str, code: str) -> types.ModuleType:
    """Runs a file's text as a module with the file's name. Its folder joins `sys.path`, so it can import its siblings."""
    name = os.path.splitext(os.path.basename(path))[0]
    module = types.ModuleType(name)
    module.__file__ = path
    sys.path.insert(0, os.path.dirname(path))
    sys.modules[name] = module
    exec(compile(code, path, "exec"), module.__dict__)
    return module


def parse(code: str, where: str) -> dict[str, ast.stmt]:
    """The names that a module's text binds, each with its statement, including those under `if`, `try` and `with`.

    Raises:
        ConfigError: the text is not valid Python. `where` names the source.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"valid Python in {where}", f"{error.args[0]}{line}", "Fix the file.") from None
    return dict(_bindings(tree.body))


def stand_in_for(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Callable[..., object]:
    """A function with the same name and signature that must not be called."""

    def function(*_: object, **__: object) -> None:
        raise AssertionError("a stand-in must not be called")

    function.__name__ = node.name
    function.__signature__ = inspect.Signature(list(_parameters(node.args)))  # type: ignore[attr-defined]
    return function


def _bindings(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
            case ast.Assign(targets=targets):
                yield from ((leaf.id, node) for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case _:
                for part in ("body", "orelse", "finalbody", "handlers"):
                    yield from _bindings(getattr(node, part, ()))


def _parameters(arguments: ast.arguments) -> Iterator[inspect.Parameter]:
    kinds = inspect.Parameter
    placed: list[tuple[ast.arg, Any]] = [(each, kinds.POSITIONAL_ONLY) for each in arguments.posonlyargs]
    placed += [(each, kinds.POSITIONAL_OR_KEYWORD) for each in arguments.args]
    first_default = len(placed) - len(arguments.defaults)
    for place, (each, kind) in enumerate(placed):
        yield inspect.Parameter(each.arg, kind, default=None if place >= first_default else kinds.empty)
    if arguments.vararg:
        yield inspect.Parameter(arguments.vararg.arg, kinds.VAR_POSITIONAL)
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield inspect.Parameter(each.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
    if arguments.kwarg:
        yield inspect.Parameter(arguments.kwarg.arg, kinds.VAR_KEYWORD)
