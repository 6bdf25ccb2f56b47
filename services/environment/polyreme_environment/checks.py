"""The environment service's check before a run starts: its files and its class.

Invariant: the check reads a user's file but never runs it.
"""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from polyreme.config.data import Sources, TaskSource
from polyreme.config.environment import EnvironmentConfig, McpServer, PythonTool
from polyreme.config.python_source import FUNCTIONS, parse, read_source
from polyreme.config.run import RunConfig
from polyreme.dataset.source import read_objects
from polyreme.errors import ConfigError, PolyremeError
from polyreme.net import tls
from polyreme_environment.contract import METHODS
from polyreme_environment.foreign_classes.verl_tools import TOOL_METHODS


def check(config: RunConfig) -> Iterator[str | PolyremeError]:
    """Yields errors about a run's environments."""
    security = config.environment_security
    if security is not None and security != config.security:  # the core checks the run's section
        try:
            tls.check_files(security)
        except ConfigError as error:
            yield error
    for name, section in config.environments.items():
        yield from _check_one(section, config.played_data(name)[0], config.task_sources(name))


def _check_one(section: EnvironmentConfig, data: Sources, sources: Sequence[TaskSource]) -> Iterator[str | PolyremeError]:
    """Yields errors about an environment. Raises ConfigError.

    Args:
        data: what is played in it.
        sources: what names tools.
    """
    yield from _check_tools(section.tools, sources)
    if section.venv is not None:
        yield from _check_package(data, section.venv)
    if section.file is None:
        return  # another program, which may start later, or tools
    bound = _parsed(section.file, "file")
    if section.function is not None:
        if section.function not in bound and "*" not in bound:
            functions = sorted(name for name, node in bound.items() if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
            raise ConfigError(
                f"a function {section.function} in {section.file}", f"the functions {functions}", "Fix environment.function."
            )
        return
    classes = {name: node for name, node in bound.items() if isinstance(node, ast.ClassDef) and not name.startswith("_")}
    if section.name is not None and section.name not in bound and "*" not in bound:
        raise ConfigError(f"a class {section.name} in {section.file}", f"the classes {sorted(classes)}", "Fix environment.name.")
    # A base class may have the methods, so only a class without bases is judged.
    usable = {name: _methods(node) for name, node in classes.items() if not node.bases}
    by_tools = [name for name, methods in usable.items() if "reset" in methods and (methods - {"reset", "close"})]
    found = [name for name in by_tools if "step" in usable[name]] or by_tools
    if not found and any(methods >= TOOL_METHODS for methods in usable.values()):
        return
    if section.name is None and len(found) != 1 and not any(node.bases for node in classes.values()):
        raise ConfigError(
            f"one class with {METHODS} in {section.file}",
            f"the classes {found}",
            "Set environment.name." if found else "Write one.",
        )


def _check_tools(tools: Sequence[object], sources: Sequence[TaskSource]) -> Iterator[PolyremeError]:
    """Yields errors about tools that the data names. Those of MCP servers are known only when these run. Raises ConfigError."""
    known = [each if isinstance(each, str) else "python" for each in tools if isinstance(each, str | PythonTool)]
    for tool in tools:
        if isinstance(tool, Path):
            bound = _parsed(tool, "tools")
            functions = [name for name, node in bound.items() if isinstance(node, FUNCTIONS) and not name.startswith("_")]
            if not functions:
                raise ConfigError(f"public functions in {tool}", "none", "Write one, with types and a docstring.")
            known += functions
    if any(isinstance(each, McpServer) for each in tools):
        return
    for source in sources:
        if others := [name for name in source.tools or () if name not in known]:
            yield ConfigError(
                f"tools of environment.tools ({', '.join(known)}) for the rows of {source.path}",
                others[0],
                "Fix `tools` of one of the two.",
            )


def _parsed(file: Path, key: str) -> dict[str, ast.stmt]:
    """The names that a file binds. Raises ConfigError, which names the key."""
    return parse(read_source(file, f"Fix environment.{key}."), str(file))


def _check_package(data: Sources, venv: Path) -> Iterator[PolyremeError]:
    """Yields errors about an environment whose package is in a virtual environment."""
    if not (venv / "bin" / "python").is_file():
        yield ConfigError(f"a virtual environment at {venv}", "none", "Fix environment.venv.")
    if isinstance(data, Path) and data.is_file():
        row = next((fields for _, fields in read_objects(data)), {})
        if not isinstance(row.get("task"), dict):
            do = "Write the data by `polyreme environment tasks run.yaml`."
            yield ConfigError(f"rows with a column `task` in {data}", f"the columns {sorted(row)}", do)


def _methods(node: ast.ClassDef) -> set[str]:
    """The public methods of a class."""
    functions = (each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return {name for name in functions if not name.startswith("_")}
