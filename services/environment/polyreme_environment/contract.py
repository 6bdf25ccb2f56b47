"""The contract of an environment in a Python file: a class with `reset`, and `step` or tools.

    class Guess:
        def reset(self, row, seed):            # seed only if it has this parameter
            self.secret = row["answer"]
            return "Guess a number."           # a text (of the user), chat messages, or None: the row's own prompt

        def step(self, message):               # message: the policy's answer
            right = message == self.secret
            return "higher", 0.0, False        # (observation, reward, done), and optionally a dict of numbers to report

A tool is a method with typed arguments that a docstring describes. A class with `step` names its tools in `tools`; an answer
without a call goes to `step`. Without `step` every public method is a tool; an answer without a call ends the episode, and
`reward` (of the episode so far) and `done` say the rest. With `rewards_calls`, `reward` also says it of calls beside `step`.

Each episode has an instance of its own. All methods, and `close` if there is one, may be coroutines.

Invariant: what a user's code returns is either understood completely or refused. Pure.
"""

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from polyreme.errors import ConfigError

Reply = Mapping[str, Any]
"""The JSON object that answers a call; it is checked where it is read."""

ROLES = ("user", "system", "tool")
RESERVED = ("reset", "step", "close")
"""Methods that are no tools."""
METHODS = "`reset`, and `step` or tools"
Message = tuple[str, str]
"""Role and content."""
ToolCall = tuple[str, str, str, float, str]
"""Name, arguments as JSON text, result, wall-clock seconds, and why it failed ("": it did not), as in the record."""


class ContractError(Exception):
    """User code has returned something else than the contract says."""


class FailedCallError(Exception):
    """A tool has failed, and `shown` is what the policy sees in place of the reason."""

    def __init__(self, reason: str, shown: str) -> None:
        super().__init__(reason)
        self.shown = shown


class LostError(Exception):
    """What an episode needs was lost through no fault of the episode; it may be played again."""


@dataclass(frozen=True)
class Moved:
    """What follows a turn: new messages, its reward, whether the episode is over, numbers to report, and the turn's tool calls.

    At the beginning of an episode: its messages, and the schemas of its tools.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    parts: dict[str, float] = field(default_factory=dict)
    calls: list[ToolCall] = field(default_factory=list)
    tools: list[dict[str, object]] = field(default_factory=list)


def own_members(module: ModuleType) -> dict[str, object]:
    """The classes and functions that a module defines itself."""
    return {name: value for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}


def has_step(kind: object) -> bool:
    """Whether a class answers by `step`."""
    return callable(getattr(kind, "step", None))


def tool_names(kind: type[object]) -> list[str]:
    """The names of a class's tools, in the order of its definition, inherited ones last."""
    if has_step(kind) or "tools" in vars(kind):
        return list(getattr(kind, "tools", ()))
    found = [name for base in kind.__mro__[:-1] for name, value in vars(base).items() if inspect.isfunction(value)]
    return [name for name in dict.fromkeys(found) if not name.startswith("_") and name not in RESERVED]


def choose(classes: Mapping[str, object], name: str | None, where: str) -> type[Any]:
    """The environment among the public classes of a module: of those with `step`, or if none has it, of those with tools.

    Raises:
        ConfigError: it is ambiguous or none.
    """
    usable = {
        key: value
        for key, value in classes.items()
        if inspect.isclass(value) and not key.startswith("_") and callable(getattr(value, "reset", None))
    }
    by_tools = {key: value for key, value in usable.items() if has_step(value) or tool_names(value)}
    found = {key: value for key, value in by_tools.items() if has_step(value)} or by_tools
    if name is not None:
        if name not in by_tools:
            raise ConfigError(f"a class {name} with {METHODS} in {where}", _listed(by_tools), "Fix environment.name.")
        return by_tools[name]
    if len(found) != 1:
        raise ConfigError(
            f"one class with {METHODS} in {where}", _listed(found), "Set environment.name." if found else "Write one."
        )
    return next(iter(found.values()))


def begun(answer: object, limit: int) -> list[Message]:
    """The messages that `reset` returned. Raises ContractError."""
    return _messages(answer, "reset", limit)


def moved(answer: object, limit: int) -> Moved:
    """What `step` returned. `limit`: characters of its messages. Raises ContractError."""
    if not isinstance(answer, tuple) or len(answer) not in (3, 4):
        raise ContractError(f"expected step to return (observation, reward, done); found {_shown(answer)}")
    observation, reward, done, *more = answer
    messages = _messages(observation, "step", limit)
    parts = numbers(more[0] if more else {}, "step")
    if not done and not messages:
        raise ContractError("expected an observation from step, since done is false; found none")
    return Moved([] if done else messages, finite(reward, "reward of step"), bool(done), parts)


def understood(reply: Reply, limit: int) -> Moved:
    """A worker's reply, which its user code could have written. Raises ContractError, or what reading another form raises."""
    said = [{"role": role, "content": content} for role, content in reply["messages"]]
    parts = numbers(reply["parts"], "the worker")
    calls = [tool_call(*call, limit=limit) for call in reply["calls"]]
    tools = [dict(tool) for tool in reply["tools"]]
    return Moved(
        _messages(said, "the worker", limit), finite(reply["reward"], "reward"), bool(reply["done"]), parts, calls, tools
    )


def tool_call(name: str, arguments: str, result: str, seconds: float, error: str, *, limit: int) -> ToolCall:
    """A call as it may be sent: in valid Unicode, with texts of at most `limit` characters."""
    texts = [valid_text(text[:limit]) for text in (name, arguments, result, error)]
    return texts[0], texts[1], texts[2], max(0.0, finite(seconds, "seconds of a tool")), texts[3]


def _messages(value: object, method: str, limit: int) -> list[Message]:
    if value is None:
        return []
    listed = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(each, Mapping) for each in listed):
        raise ContractError(f"expected {method} to return a text or a list of messages; found {_shown(value)}")
    messages = []
    for each in listed:
        role, content = each.get("role"), each.get("content")
        if role not in ROLES or not isinstance(content, str) or each.keys() != {"role", "content"}:
            raise ContractError(
                f"expected messages {{role: {', '.join(ROLES)}; content: text}} from {method}; found {_shown(each)}"
            )
        messages.append((str(role), content))
    if (chars := sum(len(content) for _, content in messages)) > limit:
        raise ContractError(f"expected at most environment.max_message_chars = {limit} characters from {method}; found {chars}")
    try:
        for _, content in messages:
            content.encode()
    except UnicodeEncodeError as error:
        raise ContractError(f"expected valid Unicode from {method}; found {error}") from None
    return messages


def result_of(tool: str, answer: object) -> str:
    """What a tool returned as text: a text as it is, another value as JSON. Raises ContractError."""
    if isinstance(answer, str):
        return valid_text(answer)
    try:
        return valid_text(json.dumps(answer, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ContractError(
            f"expected {tool} to return a text or a value that JSON has; found {_shown(answer)}: {error}"
        ) from None


def valid_text(text: str) -> str:
    """The text with `?` for each half of a surrogate pair: texts of Python may have these, and messages of gRPC may not."""
    return text.encode(errors="replace").decode()


def numbers(value: object, what: str) -> dict[str, float]:
    """Numbers to report, by name. `what` gave them. Raises ContractError."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ContractError(f"expected a dict of numbers from {what}; found {_shown(value)}")
    return {valid_text(name): finite(each, f"{name:.100} of {what}") for name, each in value.items()}


def finite(value: object, what: str) -> float:
    try:
        if isinstance(value, str | bytes | bytearray):  # a text that looks like a number is an answer, not its reward
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ContractError(f"expected a number as the {what}; found {_shown(value)}") from None
    if not math.isfinite(number):
        raise ContractError(f"expected a finite {what}; found {number}")
    return number


def _listed(found: Mapping[str, object]) -> str:
    return ", ".join(sorted(found)) or "none"


def _shown(value: object) -> str:
    try:
        return f"{value!r:.100}"
    except Exception:  # noqa: BLE001 repr() of a user's object may raise
        return f"a {type(value).__name__}"
