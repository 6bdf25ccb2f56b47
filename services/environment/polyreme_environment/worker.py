"""The main function of a worker: loads the class, then plays many episodes call by call.

Invariant: coroutine methods run as tasks of the event loop in the main thread. An episode's other methods run in its own thread,
since what they keep, such as a connection, may belong to its thread; or without `threads`, in turn in the main thread.
"""

import hashlib
import inspect
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from polyreme.config.python_source import load_module
from polyreme.dataset.source import ALLOWED_TOOLS
from polyreme_environment.call_server import Answer, Call, CallThread, Setup, serve_calls
from polyreme_environment.contract import Moved, begun, finite, has_step, moved, own_members
from polyreme_environment.foreign_classes.choice import environment_class
from polyreme_environment.foreign_classes.stand_ins import offer_stand_ins
from polyreme_environment.tool_calls import Calls, find_calls
from polyreme_environment.toolbox import Toolbox
from polyreme_environment.tools.tool_class import make_class

_SHARE = 0.8
"""Fraction of a call's seconds for tools that can end themselves in time. Beyond all of them, the episode has failed."""


def main(channel: socket.socket) -> int:
    """Runs a worker on its socket until the socket closes. Returns the exit status.

    The first message has `path`, `code`, `name` and `options` of a file, or `tools`; `memory_mib`, `max_chars`, `tool_parser`,
    `threads` and `seconds` (of a call). Then each call has `episode`, `method` and `arguments`: `reset` (row, seed), `step`
    (text, text with special tokens, whether they begin within a thought) or `close`. Its reply has either the fields of `Moved`,
    or `error`, or `lost`. The calls of an episode come one after the other.
    """
    return serve_calls(channel, "an environment", _load)


def _load(setup: Setup) -> tuple[str, str, Answer]:
    kind, options = _class_of(setup)
    player = Player(kind, options, Toolbox(kind, setup["path"]), setup)
    digest = hashlib.sha256(repr([setup[key] for key in ("code", "name", "options", "tools")]).encode()).hexdigest()[:12]
    return f"{kind.__name__}-{digest}", (inspect.getdoc(kind) or kind.__name__).partition("\n")[0], player.play


def _class_of(setup: Setup) -> tuple[type[Any], dict[str, Any]]:
    """The class of a worker, and the arguments that make an episode. Raises ConfigError, or what the user's code does."""
    if setup["tools"]:
        return make_class(setup["tools"], _SHARE * setup["seconds"]), setup["options"]
    offer_stand_ins()
    return environment_class(
        own_members(load_module(setup["path"], setup["code"])), setup["name"], setup["options"], setup["path"]
    )


@dataclass
class _Played:
    """An episode: its tools, its instance, the attribute `reward` after its last turn, and its thread once it needs one."""

    tools: Toolbox
    instance: Any = None
    reward: float = 0.0
    thread: CallThread | None = None


class Player:
    """Plays the episodes of a worker. `setup`: its first message."""

    def __init__(self, kind: Any, options: dict[str, object], toolbox: Toolbox, setup: Setup) -> None:
        self._kind, self._toolbox, self._parser = kind, toolbox, setup["tool_parser"]
        self._options, self._limit, self._threads = options, setup["max_chars"], setup["threads"]
        self._selects, self._seconds = bool(setup["tools"]), _SHARE * setup["seconds"]
        self._episodes: dict[int, _Played] = {}

    async def play(self, call: Call) -> Mapping[str, object]:
        """Makes one call. Raises what user code does, and ContractError."""
        methods: dict[str, Callable[..., Awaitable[Moved]]] = {"reset": self._reset, "step": self._step, "close": self._close}
        return vars(await methods[call["method"]](call["episode"], *call["arguments"]))

    async def _reset(self, number: int, row: dict[str, object], seed: int) -> Moved:
        episode = self._episodes[number] = _Played(self._tools_for(row))

        def begin() -> Any:
            episode.instance = self._kind(**self._options)
            positional, named = _reset_arguments(episode.instance.reset, row, seed)
            return episode.instance.reset(*positional, **named)

        is_coroutine = inspect.iscoroutinefunction(self._kind.reset)
        first = await (begin() if is_coroutine else self._made(episode, begin))
        return Moved(begun(first, self._limit), tools=episode.tools.schemas)

    def _tools_for(self, row: dict[str, object]) -> Toolbox:
        """The tools of an episode. Of a run's tools, its row may choose."""
        return self._toolbox.only(row[ALLOWED_TOOLS]) if self._selects and ALLOWED_TOOLS in row else self._toolbox

    async def _step(self, number: int, text: str, raw: str, in_thought: bool) -> Moved:
        episode = self._episodes[number]
        calls: Calls = find_calls(raw, self._parser, in_thought=in_thought) if episode.tools.schemas else []
        if not calls and has_step(self._kind):
            return moved(await self._made(episode, partial(episode.instance.step, text)), self._limit)
        answered = await episode.tools.answer(episode.instance, calls, self._limit, self._seconds, partial(self._made, episode))
        if has_step(self._kind):
            reward, done = _gained(episode) if getattr(self._kind, "rewards_calls", False) else 0.0, False
        else:
            reward, done = _gained(episode), not calls or bool(getattr(episode.instance, "done", False))
        return Moved([] if done else [("tool", result) for _, _, result, _, _ in answered], reward, done, calls=answered)

    async def _close(self, number: int) -> Moved:
        if (episode := self._episodes.pop(number, None)) is not None:
            try:
                if (close := getattr(episode.instance, "close", None)) is not None:
                    await self._made(episode, close)
            finally:
                if episode.thread is not None:
                    episode.thread.end()
        return Moved()

    async def _made(self, episode: _Played, method: Callable[[], object]) -> object:
        """What a method returns."""
        if not self._threads or inspect.iscoroutinefunction(method):
            answer = method()
        else:
            episode.thread = episode.thread or CallThread()
            answer = await episode.thread.run(method)
        return await answer if inspect.iscoroutine(answer) else answer


def _gained(episode: _Played) -> float:
    """What the attribute `reward` of an episode has gained since the last turn."""
    before, episode.reward = episode.reward, finite(getattr(episode.instance, "reward", 0.0), "attribute `reward`")
    return episode.reward - before


def _reset_arguments(
    reset: Callable[..., object], row: dict[str, object], seed: int
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Row and seed as `reset` takes them: `reset(row)`, `reset(row, seed)`, or the columns by name, `reset(**row)` as in TRL."""
    parameters = inspect.signature(reset).parameters
    seeded: dict[str, object] = {"seed": seed} if "seed" in parameters else {}
    kinds = {name: each.kind for name, each in parameters.items()}
    takes_columns = inspect.Parameter.VAR_KEYWORD in kinds.values() and kinds.get("row") in (None, inspect.Parameter.VAR_KEYWORD)
    return ((), {**row, **seeded}) if takes_columns else ((row,), seeded)
