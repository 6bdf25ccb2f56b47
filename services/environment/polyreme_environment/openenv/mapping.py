"""What a policy's answer is to an OpenEnv server, and what the server's observation is to the policy.

Invariant: a mapping that is declared fits the schema of the server's actions, or the run does not start. Pure.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from polyreme.config.named_input import filled
from polyreme.errors import ConfigError
from polyreme_environment.contract import ContractError, Moved, Reply, finite, moved, numbers
from polyreme_environment.tool_schema import Schema

TEXT = "$text"
"""Stands for the policy's answer in `environment.action`."""
_COLUMN = re.compile(r"\$[A-Za-z_]\w*")
_TOOL_FIELDS = {"tool_name", "arguments"}


@dataclass(frozen=True)
class ActionForm:
    """How answers become actions.

    Attributes:
        template: the action, with TEXT where the answer belongs; None: an answer without a tool call ends the episode.
        structured: the fields whose values are JSON objects or lists.
        has_tools: whether the environment has tools.
    """

    template: dict[str, object] | None
    structured: frozenset[str]
    has_tools: bool

    def action(self, text: str) -> dict[str, object] | None:
        """The action of an answer without a tool call."""
        if self.template is None:
            return None
        return {key: _parsed(text) if value == TEXT and key in self.structured else filled(value, {TEXT: text})
                for key, value in self.template.items()}  # fmt: skip


def action_form(declared: Mapping[str, object] | None, schema: Schema) -> ActionForm:
    """The form for a server's schema of actions. Raises ConfigError unless `declared` fits it, or there is only one way.

    Args:
        declared: environment.action.
    """
    properties = dict(schema.get("properties", {}))
    own = [name for name in properties if name != "metadata"]
    required = list(schema.get("required", ()))
    has_tools = not own or set(own) >= _TOOL_FIELDS
    structured = frozenset(name for name, each in properties.items() if each.get("type") in ("object", "array"))
    if declared is None:
        if has_tools:
            return ActionForm(None, structured, has_tools)
        single = own if len(own) == 1 else required
        if len(single) != 1:
            raise ConfigError(f"environment.action with the fields {own} of the server's actions", "none",
                              f'Write it, such as {{{own[0]}: "{TEXT}"}}.')  # fmt: skip
        return ActionForm({single[0]: TEXT}, structured, has_tools)
    if unknown := declared.keys() - properties.keys():
        raise ConfigError(f"the fields {own} of the server's actions", f"{sorted(unknown)}", "Fix environment.action.")
    if missing := set(required) - declared.keys():
        raise ConfigError(f"all required fields of the server's actions, {required}", f"none for {sorted(missing)}",
                          "Add them to environment.action.")  # fmt: skip
    return ActionForm(dict(declared), structured, has_tools)


def reset_fields(options: Mapping[str, object], row: Mapping[str, object]) -> dict[str, object]:
    """Fields of `reset`: the options, with each `$NAME` as that column of the row. Raises ContractError for a missing column."""
    if missing := [name for name in _names(options) if name not in row]:
        raise ContractError(f"expected the columns {missing} of environment.options in the row; found {sorted(row)}")
    columns = {f"${name}": value for name, value in row.items()}
    return {key: filled(value, columns) for key, value in options.items()}


def _names(template: object) -> list[str]:
    """The names that stand for columns in a JSON value."""
    if isinstance(template, str):
        return [template[1:]] if _COLUMN.fullmatch(template) else []
    values = template.values() if isinstance(template, Mapping) else template if isinstance(template, list) else ()
    return [name for value in values for name in _names(value)]


def begun(reply: Reply, path: str | None) -> str | list[object] | None:
    """What a reply to `reset` says to the policy; None: nothing, so the row's own prompt stands. Raises ContractError."""
    if reply.get("done"):
        raise ContractError("expected an episode that goes on after reset; found done: true")
    return _said(reply, path) or None


def observed(reply: Mapping[str, object], path: str | None, limit: int) -> Moved:
    """What a reply to `step` says. Raises ContractError."""
    reward, done, parts = scored(reply)
    said = "" if done else _said(reply, path)
    if said is None:
        found = sorted(_observation(reply))
        raise ContractError(f"expected environment.observation = {path} in the observation; found {found}")
    return moved((said or None, reward, done, parts), limit)


def scored(reply: Mapping[str, object]) -> tuple[float, bool, dict[str, float]]:
    """A `step` reply's reward (null is 0), whether it ends the episode, and the numbers in its metadata. Raises ContractError."""
    metadata = reply.get("metadata") or _observation(reply).get("metadata")
    given = metadata.items() if isinstance(metadata, Mapping) else ()
    parts = numbers({name: value for name, value in given if isinstance(value, bool | int | float)}, "step")
    reward = reply.get("reward")
    return 0.0 if reward is None else finite(reward, "reward of step"), bool(reply.get("done")), parts


def tool_schemas(listed: Reply) -> list[Schema]:
    """The tools of a reply to tools/list, as chat templates take them. Raises ContractError."""
    tools = (listed.get("result") or {}).get("tools")
    if not isinstance(tools, list) or not tools:
        raise ContractError(f"expected the tools of the environment; found {listed!r:.300}")
    return [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("inputSchema") or tool.get("input_schema") or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def tool_result(reply: Mapping[str, object]) -> tuple[str, str]:
    """The text that a tool returned, and why it failed ("": it did not)."""
    observation = _observation(reply)
    if error := observation.get("error"):
        return "", str(error.get("message") if isinstance(error, Mapping) else error)
    result = observation.get("result")
    if not isinstance(result, Mapping):
        return _text(result), ""
    content = result.get("content")
    texts = (
        [each.get("text", "") for each in content if isinstance(each, Mapping)] if isinstance(content, list) else [_text(result)]
    )
    text = "\n".join(map(str, texts))
    return ("", text) if result.get("is_error") or result.get("isError") else (text, "")


def _said(reply: Reply, path: str | None) -> str | list[object] | None:
    """The part of an observation that the policy sees; None: there is none."""
    observation = _observation(reply)
    value: object = observation
    if path is not None:
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
    else:
        own = {key: each for key, each in observation.items() if key != "metadata"}
        value = next(iter(own.values())) if len(own) == 1 else own or None
    if isinstance(value, list) and all(isinstance(each, Mapping) and each.keys() == {"role", "content"} for each in value):
        return value
    return None if value is None else _text(value)


def _observation(reply: Mapping[str, object]) -> dict[str, object]:
    found = reply.get("observation")
    if not isinstance(found, Mapping):
        raise ContractError(f"expected an observation; found {found!r:.100}")
    return dict(found)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parsed(text: str) -> object:
    """The object or list that a text is, or the text: the server says what is wrong with it."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict | list) else text
