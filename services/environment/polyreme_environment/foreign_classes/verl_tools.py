"""verl's tool classes as an environment of our contract.

A class has `__init__(config, tool_schema)`, `get_openai_tool_schema()`, and the coroutines `create(instance_id, ...)`,
`execute(instance_id, parameters)` -> (response, reward, metrics), `calc_reward(instance_id)` and `release(instance_id)`. A worker
has one object of each; an episode has an instance of each object. The column `extra_info` may have `tools_kwargs`: by tool,
`create_kwargs`, `execute_kwargs`, `calc_reward_kwargs` and `release_kwargs`.

Invariant: an instance that was created is released once.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

from polyreme.errors import ConfigError
from polyreme_environment.contract import ContractError, finite
from polyreme_environment.foreign_classes.stand_ins import BaseTool

TOOL_METHODS = frozenset({"get_openai_tool_schema", "create", "execute", "calc_reward", "release"})
_KEYS = {"class_name", "config", "tool_schema"}
_FIX = "Set environment.options.tools as in verl's file of tools: a list of {class_name, config, tool_schema}."


def is_tool(kind: object) -> bool:
    """Whether a class has the signature of verl's tools."""
    return (
        inspect.isclass(kind)
        and all(callable(getattr(kind, name, None)) for name in TOOL_METHODS)
        and {"instance_id", "parameters"} <= inspect.signature(kind.execute).parameters.keys()  # type: ignore[attr-defined]
    )


class ToolsEpisode:
    """An episode with tools of verl. An answer without a call ends it."""

    rewards_calls = True
    tools: tuple[str, ...] = ()
    _objects: Mapping[str, BaseTool] = {}

    def __init__(self) -> None:
        self.reward = 0.0
        self._instances: dict[str, str] = {}
        self._metrics: dict[str, float] = {}

    async def reset(self, row: dict[str, Any]) -> None:
        """Creates the instances."""
        self._given = (row.get("extra_info") or {}).get("tools_kwargs") or {}
        for name, tool in self._objects.items():
            created = self._arguments(name, "create")
            if any(each.kind is each.VAR_KEYWORD for each in inspect.signature(tool.create).parameters.values()):
                created = {**created, "create_kwargs": created}  # as verl's agent loop passes them
            answer = await tool.create(str(uuid4()), **created)
            instance, *response = answer if isinstance(answer, tuple) else (answer,)
            self._instances[name] = instance
            if any(_text_of(each, f"{name}.create") for each in response):
                raise ContractError(f"expected an empty response of {name}.create, since the row's prompt begins; found a text")
            try:
                inspect.signature(tool.execute).bind(instance, {}, **self._arguments(name, "execute"))
            except TypeError as error:
                raise ContractError(f"expected {name}.execute(instance_id, parameters); found {error}") from None

    async def step(self, message: str) -> tuple[None, float, bool, dict[str, float]]:
        """The end: the rewards of the instances."""
        total = 0.0
        for name, tool in self._objects.items():
            reward = await tool.calc_reward(self._instances[name], **self._arguments(name, "calc_reward"))
            total += finite(reward, f"reward of {name}.calc_reward")
        return None, total, True, self._metrics

    async def close(self) -> None:
        """Releases all instances, also when one of them raises."""
        if self._instances:
            name, instance = self._instances.popitem()
            try:
                await self._objects[name].release(instance, **self._arguments(name, "release"))
            finally:
                await self.close()

    async def _execute(self, name: str, parameters: dict[str, object]) -> str:
        arguments = self._arguments(name, "execute")
        answer = await self._objects[name].execute(self._instances[name], parameters, **arguments)
        if not isinstance(answer, tuple) or len(answer) != 3 or not isinstance(answer[2] or {}, Mapping):
            raise ContractError(f"expected {name}.execute to return (response, reward, metrics); found {answer!r:.100}")
        response, reward, metrics = answer
        text = _text_of(response, f"{name}.execute")
        self.reward += finite(reward or 0.0, f"reward of {name}.execute")
        numbers = {f"{name}/{key}": float(value) for key, value in (metrics or {}).items() if isinstance(value, int | float)}
        self._metrics.update(numbers)
        return text

    def _arguments(self, name: str, method: str) -> dict[str, object]:
        return (self._given.get(name) or {}).get(f"{method}_kwargs") or {}


def tools_class(classes: Mapping[str, Any], options: Mapping[str, Any], where: str) -> type[ToolsEpisode]:
    """The environment of verl's tools: all of `classes`, or those that `options` lists. Makes their objects.

    Raises:
        ConfigError: the options or a schema are not what verl has, or two tools have one name.
    """
    methods: dict[str, object] = {}
    objects: dict[str, BaseTool] = {}
    for kind, config, schema in _listed(classes, options, where):
        tool = _made(kind, config, schema, where)
        found = tool.get_openai_tool_schema()
        declared = found if isinstance(found, dict) else found.model_dump(exclude_unset=True, exclude_none=True)
        name = declared["function"]["name"]
        if name in objects or name == "reward" or hasattr(ToolsEpisode, name):
            raise ConfigError(
                f"another name of the tool {name} in {where}", "a name that is taken", "Rename it in its tool_schema."
            )
        objects[name], methods[name] = tool, _method(name, declared)
    about = f"The tools {', '.join(objects)}."
    return type("VerlTools", (ToolsEpisode,), {**methods, "tools": tuple(objects), "_objects": objects, "__doc__": about})


def _method(name: str, schema: dict[str, object]) -> Callable[..., object]:
    async def call(self: ToolsEpisode, /, **parameters: object) -> str:
        return await self._execute(name, parameters)

    call.schema = schema  # type: ignore[attr-defined]
    return call


def _listed(classes: Mapping[str, Any], options: Mapping[str, Any], where: str) -> list[tuple[Any, dict[str, Any], Any]]:
    """Class, config and schema of each tool. Raises ConfigError."""
    if unknown := options.keys() - {"tools"}:
        raise ConfigError(f"the option `tools` for the tools of verl in {where}", ", ".join(sorted(unknown)), _FIX)
    if not options:
        return [(kind, {}, None) for kind in classes.values()]
    listed = []
    for entry in options["tools"] or ():
        if not isinstance(entry, Mapping) or not entry.keys() <= _KEYS or "class_name" not in entry:
            raise ConfigError("{class_name, config, tool_schema} in environment.options.tools", f"{entry!r:.100}", _FIX)
        name = str(entry["class_name"]).rpartition(".")[2]
        if name not in classes:
            raise ConfigError(f"a tool class {name} in {where}", ", ".join(sorted(classes)), "Fix class_name.")
        listed.append((classes[name], entry.get("config") or {}, entry.get("tool_schema")))
    return listed


def _made(kind: type[BaseTool], config: dict[str, object], schema: object, where: str) -> BaseTool:
    try:
        if schema is not None:
            schema = importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema.model_validate(schema)
        return kind(config, schema)
    except (ValueError, TypeError, AttributeError, AssertionError) as error:
        raise ConfigError(f"a tool {kind.__name__} in {where} that loads", f"{type(error).__name__}: {error}", _FIX) from None


def _text_of(response: object, what: str) -> str:
    """The text of a ToolResponse, or a text as verl's earlier releases return it. Raises ContractError."""
    if isinstance(response, str):
        return response
    for part in ("image", "video"):
        if getattr(response, part, None):
            raise ContractError(f"expected a text from {what}, since an episode has no images; found {part}")
    if not hasattr(response, "text"):
        raise ContractError(f"expected a ToolResponse from {what}; found {response!r:.100}")
    return response.text or ""
