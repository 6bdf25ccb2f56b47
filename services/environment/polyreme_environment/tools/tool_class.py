"""The environment of a run with `environment.tools`: a class whose methods are the tools of all sources, without rewards.

Invariant: two tools never have the same name.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from polyreme.config.environment import EnvironmentConfig, McpServer, PythonLimits, PythonTool
from polyreme.config.python_source import load_module, read_source
from polyreme.errors import ConfigError
from polyreme_environment.contract import own_members
from polyreme_environment.tool_schema import Schema, tool_schema
from polyreme_environment.tools.calculator import calculate
from polyreme_environment.tools.mcp import McpClient
from polyreme_environment.tools.python import python_schema, python_tool

Source = Mapping[str, Any]
Sources = Sequence[Source]


def sources_of(config: EnvironmentConfig) -> list[dict[str, object]]:
    """`environment.tools` as a worker gets them, with the text of the files. Raises ConfigError when one cannot be read."""
    found: list[dict[str, object]] = []
    for tool in config.tools:
        if tool == "python":
            found.append({"python": PythonLimits().model_dump()})
        elif isinstance(tool, PythonTool):
            found.append({"python": tool.python.model_dump()})
        elif isinstance(tool, str):
            found.append({"built_in": tool})
        elif isinstance(tool, McpServer):
            found.append({"mcp": tool.model_dump()})
        else:
            found.append({"path": str(tool), "code": read_source(tool, "Fix environment.tools.")})
    return found


class Kept(Protocol):
    """What a tool keeps from call to call of an episode."""

    def close(self) -> None: ...


class RowTools:
    """Tools for a row of the data, whose own prompt begins the conversation. `kept`: what each tool keeps, by the tool's name."""

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}

    def reset(self, row: dict[str, object]) -> None: ...

    def close(self) -> None:
        """Ends what tools have kept."""
        for each in self.kept.values():
            each.close()


def calculator(self: RowTools, expression: str) -> int | float:
    """Calculates the value of an arithmetic expression.

    Args:
        expression: numbers with + - * / // % **, parentheses, and abs, max, min, round and sqrt
    """
    return calculate(expression)


BUILT_IN: Mapping[str, Callable[..., object]] = {"calculator": calculator}


def declared(config: EnvironmentConfig) -> dict[str, Schema]:
    """The schemas of the built-in tools, by name. Those of files and servers are known when these run."""
    found: dict[str, Schema] = {}
    for tool in config.tools:
        if tool == "python" or isinstance(tool, PythonTool):
            found["python"] = python_schema(tool.python if isinstance(tool, PythonTool) else PythonLimits())
        elif isinstance(tool, str):
            found[tool] = tool_schema(BUILT_IN[tool], tool, "environment.tools")
    return found


def make_class(sources: Sources, seconds: float) -> type[RowTools]:
    """The class of a worker's sources, with the seconds of a call that a server answers. Runs the files.

    Raises:
        ConfigError: a file has no tools, or two tools have one name.
    """
    tools: dict[str, object] = {}
    for source in sources:
        new = _tools_of(source, seconds)
        if twice := sorted(new.keys() & tools.keys()):
            raise ConfigError("tools with different names in environment.tools", f"{twice[0]} twice", "Rename one.")
        tools |= new
    return type("RowTools", (RowTools,), {**tools, "tools": tuple(tools), "__doc__": f"The tools {', '.join(tools)}."})


def _tools_of(source: Source, seconds: float) -> dict[str, Any]:
    if "built_in" in source:
        return {source["built_in"]: BUILT_IN[source["built_in"]]}
    if "python" in source:
        return {"python": python_tool(source["python"])}
    if "mcp" in source:
        return dict(McpClient(source["mcp"], seconds).tools())
    path = source["path"]
    functions = {
        name: staticmethod(value)
        for name, value in own_members(load_module(path, source["code"])).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    if not functions:
        raise ConfigError(f"public functions in {path}", "none", "Write one, with types and a docstring.")
    return functions
