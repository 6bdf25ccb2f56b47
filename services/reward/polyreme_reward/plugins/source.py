"""A reward function's parameters, read from source text.

Invariant: the text is parsed and never run. What only running it could tell is left open (None).
"""

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polyreme.errors import ConfigError
from polyreme_reward.plugins.load import USUAL_NAMES, choose_function, no_function

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def stand_in(code: str, where: str, name: str | None) -> Callable[..., Any] | None:
    """A function of the same name and parameters as the reward function in a module's source, which does nothing.

    Args:
        code: the module's text.
        where: the module, for errors.
        name: the function's name; None: as `load` chooses one.

    Returns:
        None when the source alone does not tell: the name may be assigned, imported, decorated or a class.

    Raises:
        ConfigError: the text is no Python, or it has no such function.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"Python in {where}", f"{error.args[0]}{line}", "Fix the file.") from None
    bound = dict(_bindings(tree.body))
    public = [key for key, node in bound.items() if isinstance(node, _FUNCTIONS) and not key.startswith("_")]
    if name is not None:
        if not {name, "*"} & bound.keys():
            raise no_function(name, public, where)
        chosen = name
    else:
        values = [key for key, node in bound.items() if not isinstance(node, (*_FUNCTIONS, ast.Import, ast.ImportFrom))]
        if set(USUAL_NAMES) & set(values) or (values and not public):
            return None
        chosen = choose_function(public, where)
    node = bound.get(chosen)
    return _of(node) if isinstance(node, _FUNCTIONS) and not node.decorator_list else None


def find_source(module: str) -> Path | None:
    """The file of an importable module; None for one that is no Python source. Its packages are not imported.

    Raises:
        ConfigError: there is no such module.
    """
    first, *inside = module.split(".")
    spec = find_spec(first)
    for depth in range(1, len(inside) + 1):
        if spec is None:
            break
        spec = PathFinder.find_spec(".".join([first, *inside[:depth]]), spec.submodule_search_locations)
    if spec is None:
        raise ConfigError(f"an importable module {module}", "none of that name", "Install it, or fix `module`.")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _bindings(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """The names that a module's statements bind, with the statement, also under `if`, `try` and `with`."""
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


def _of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> None:
        raise AssertionError("a stand-in is not for calling")

    function.__name__ = node.name
    function.__signature__ = inspect.Signature(list(_parameters(node.args)))  # type: ignore[attr-defined]
    return function


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
