"""The tools of an environment in a worker: declares them, and answers the calls of the policy.

Invariant: every call is answered, in order. A call that is malformed, names no tool, does not fit its arguments, or whose tool
raises, is answered with the reason: the policy sees it, and the episode goes on.
"""

import inspect
import time
from collections.abc import Awaitable, Callable
from copy import copy
from functools import partial

from polyreme.dataset.source import ALLOWED_TOOLS
from polyreme.errors import ConfigError
from polyreme_environment.contract import RESERVED, ContractError, FailedCallError, LostError, ToolCall, result_of, tool_names
from polyreme_environment.tool_calls import Calls, Malformed, ParsedCall
from polyreme_environment.tool_schema import Schema, tool_schema

_NAMED = 10


class Toolbox:
    """The tools of a class; `where` names its file in errors.

    Raises:
        ConfigError: a tool cannot be described.
    """

    def __init__(self, kind: type[object], where: str) -> None:
        self._names = tool_names(kind)
        for name in self._names:
            if not inspect.isfunction(getattr(kind, str(name), None)) or str(name) in RESERVED:
                raise ConfigError(f"names of methods as `tools` of {kind.__name__} in {where}", repr(name), "Fix `tools`.")
        tools = [(name, getattr(kind, name)) for name in self._names]
        self.schemas: list[Schema] = [getattr(tool, "schema", None) or tool_schema(tool, name, where) for name, tool in tools]

    def only(self, names: object) -> "Toolbox":
        """The same with these of its tools, in its order. Raises ContractError for another name, or what is no list of names."""
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ContractError(f"expected a list of names of tools as the row's {ALLOWED_TOOLS}; found {names!r:.100}")
        if others := [name for name in names if name not in self._names]:
            raise ContractError(f"expected {ALLOWED_TOOLS} of {', '.join(map(str, self._names))}; found {others[0]!r:.100}")
        part = copy(self)
        part._names = [name for name in self._names if name in names]
        part.schemas = [schema for name, schema in zip(self._names, self.schemas, strict=True) if name in names]
        return part

    async def answer(
        self, episode: object, calls: Calls, limit: int, seconds: float, make: Callable[[Callable[[], object]], Awaitable[object]]
    ) -> list[ToolCall]:
        """Makes the calls, one after the other.

        Args:
            episode: the instance whose methods are called.
            limit: characters of all results together.
            seconds: of all calls together. A tool that takes seconds gets an equal share of what is left.
            make: calls a method, and awaits what it returned, if needed.

        Raises:
            ContractError: a tool returned what no text can stand for.
        """
        deadline, answers = time.monotonic() + seconds, list[ToolCall]()
        for place, call in enumerate(calls):
            share = max(0.0, deadline - time.monotonic()) / (len(calls) - place)
            began, (result, error) = time.monotonic(), await self._result(episode, call, share, make)
            name = "" if isinstance(call, Malformed) else call.name
            text = cut(result or f"error: {error}" * bool(error), limit // len(calls))
            spent = time.monotonic() - began
            answers.append((cut(name, limit), cut(call.text, limit), text, spent, cut(error, limit // len(calls))))
        return answers

    async def _result(
        self,
        episode: object,
        call: ParsedCall | Malformed,
        seconds: float,
        make: Callable[[Callable[[], object]], Awaitable[object]],
    ) -> tuple[str, str]:
        """The result of a call, and why it failed ("": it did not)."""
        try:
            if isinstance(call, Malformed):
                raise ValueError(f"malformed call: {call.problem}")
            return result_of(call.name, await make(self._bound(episode, call, seconds))), ""
        except (ContractError, LostError, MemoryError):
            raise
        except FailedCallError as failed:
            return failed.shown, str(failed)
        except Exception as raised:  # noqa: BLE001 a tool may raise anything
            return "", _reason(raised)

    def _bound(self, episode: object, call: ParsedCall, seconds: float) -> Callable[[], object]:
        if call.name not in self._names:
            more = ", ..." * (len(self._names) > _NAMED)
            raise ValueError(
                f"no tool is called {call.name[:100]!r}; the tools are {', '.join(self._names[:_NAMED]) or 'none'}{more}"
            )
        tool = getattr(episode, call.name)
        if getattr(tool, "takes_seconds", False):
            tool = partial(tool, seconds)
        bound = inspect.signature(tool).bind(**call.arguments)
        return partial(tool, *bound.args, **bound.kwargs)


def cut(text: str, limit: int) -> str:
    """A text of at most `limit` characters, which says so where it was longer."""
    if len(text) <= limit:
        return text
    left_out = f" ... (cut at {limit} characters)"
    return (text[: max(0, limit - len(left_out))] + left_out)[:limit]


def _reason(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 str() of a user's exception may raise
        text = ""
    shown = text if type(error) in (TypeError, ValueError) and text else f"{type(error).__name__}: {text}"
    return shown.encode(errors="replace").decode()
