"""Chooses the class of an environment's file: one of our contract, or one of another system, recognised by its signature."""

import inspect
from collections.abc import Mapping
from typing import Any

from polyreme.errors import ConfigError
from polyreme_environment.contract import choose
from polyreme_environment.foreign_classes.openrlhf_agent import agent_class, is_agent_instance
from polyreme_environment.foreign_classes.verl_tools import is_tool, tools_class


def environment_class(
    members: Mapping[str, object], name: str | None, options: dict[str, object], where: str
) -> tuple[type[Any], dict[str, object]]:
    """The class among a module's `members` that `name` and the signatures say, in our contract, and the arguments of an episode.

    Raises:
        ConfigError: there is none, or more than one.
        TypeError: the class does not take the options.
    """
    tools = {key: value for key, value in members.items() if not key.startswith("_") and is_tool(value)}
    if name is not None and name in tools:
        return tools_class({name: tools[name]}, options, where), {}
    if tools and name is None:
        if others := [
            key for key, value in members.items() if callable(getattr(value, "reset", None)) and inspect.isclass(value)
        ]:
            found = ", ".join([*others, *tools])
            raise ConfigError(f"an environment, or tools of verl, in {where}", found, "Set environment.name.")
        return tools_class(tools, options, where), {}
    kind = choose(members, name, where)
    inspect.signature(kind).bind(**options)
    if is_agent_instance(kind):
        return agent_class(kind, options), {}
    return kind, options
