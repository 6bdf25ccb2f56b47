"""The main function of a worker: sets limits, loads the class, then plays episodes call by call.

Invariant: every call gets one reply with its number, in order, unless the process ends. The results, exceptions and output of user code leave
the process only in bounded, validated replies.
"""

import asyncio
import hashlib
import inspect
import socket
from typing import Any

from polyreme.config.python_source import load_module
from polyreme.dataset.source import ALLOWED_TOOLS
from polyreme.errors import ConfigError
from polyreme.isolation.confinement import confine, limit_memory, summary
from polyreme.isolation.wire import encode, receive
from polyreme_environment.contract import ContractError, LostError, Moved, begun, finite, has_step, moved, own_members
from polyreme_environment.foreign_classes.choice import environment_class
from polyreme_environment.foreign_classes.stand_ins import offer_stand_ins
from polyreme_environment.tool_calls import Calls, find_calls
from polyreme_environment.toolbox import Toolbox
from polyreme_environment.tools.tool_class import make_class

_SHARE = 0.8
"""Fraction of a call's seconds for tools that can end themselves in time. Beyond all of them, the worker is killed."""


def main(channel: socket.socket) -> int:
    """Runs a worker on its socket until the socket closes. Returns the exit status.

    The first message has `path`, `code`, `name` and `options` of a file, or `tools`; `memory_mib`, `max_chars`, `tool_parser` and `seconds` (of a call). Then each message is a
    call: `number`, `episode`, and `reset` ([row, seed]), `step` ([text, text with special tokens]) or `close`. Its reply has `number` and either
    the fields of `Moved`, or `error`, or `lost`.
    """
    setup = receive(channel)
    if setup is None:
        return 0
    output = confine()
    limit_memory(setup["memory_mib"])
    try:
        kind, options = _load(setup)
        toolbox = Toolbox(kind, setup["path"])
    except ConfigError as error:
        channel.sendall(encode({"failed": [error.expected, error.found, error.do]}))
        return 2
    except BaseException as error:  # noqa: BLE001 user code may raise anything
        channel.sendall(encode({"failed": ["an environment that loads", summary(error), "Fix the file."]}))
        return 2
    digest = hashlib.sha256(repr([setup[key] for key in ("code", "name", "options", "tools")]).encode()).hexdigest()[:12]
    about = (inspect.getdoc(kind) or kind.__name__).partition("\n")[0]
    channel.sendall(encode({"ready": [[f"{kind.__name__}-{digest}", about, False]]}))
    player = Player(kind, options, toolbox, setup)
    output.take()
    while (call := receive(channel)) is not None:
        channel.sendall(encode({"number": call["number"], **player.call(call), "printed": output.take()}))
    return 0


def _load(setup: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class of a worker, and the arguments that make an episode. Raises ConfigError, or what the user's code does."""
    if setup["tools"]:
        return make_class(setup["tools"]), setup["options"]
    offer_stand_ins()
    return environment_class(
        own_members(load_module(setup["path"], setup["code"])), setup["name"], setup["options"], setup["path"]
    )


class Player:
    """Plays the episodes of a worker. `setup`: its first message."""

    def __init__(self, kind: Any, options: dict[str, Any], toolbox: Toolbox, setup: dict[str, Any]) -> None:
        self._kind, self._toolbox, self._parser, self._selects = kind, toolbox, setup["tool_parser"], bool(setup["tools"])
        self._options, self._limit, self._seconds = options, setup["max_chars"], _SHARE * setup["seconds"]
        self._episodes: dict[int, Any] = {}
        self._toolboxes: dict[int, Toolbox] = {}
        self._rewards: dict[int, float] = {}
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)

    def call(self, call: dict[str, Any]) -> dict[str, Any]:
        """The reply to one call, without its number."""
        try:
            return vars(self._played(call))
        except LostError as error:
            return {"lost": str(error)}
        except ContractError as error:
            return {"error": str(error)}
        except SystemExit as error:
            return {"error": f"called sys.exit({error.code!r})"}
        except BaseException as error:  # noqa: BLE001 user code may raise anything
            return {"error": summary(error)}

    def _played(self, call: dict[str, Any]) -> Moved:
        number = call["episode"]
        if "reset" in call:
            row, seed = call["reset"]
            tools = self._toolboxes[number] = self._tools_for(row)
            episode = self._episodes[number] = self._kind(**self._options)
            positional, named = _reset_arguments(episode.reset, row, seed)
            first = begun(self._result(episode.reset(*positional, **named)), self._limit)
            self._rewards[number] = 0.0
            return Moved(first, tools=tools.schemas)
        if "step" in call:
            text, raw = call["step"]
            return self._step(number, text, find_calls(raw, self._parser) if self._toolboxes[number].schemas else [])
        episode = self._episodes.pop(number, None)
        self._toolboxes.pop(number, None)
        self._rewards.pop(number, None)
        if (close := getattr(episode, "close", None)) is not None:
            self._result(close())
        return Moved()

    def _tools_for(self, row: dict[str, Any]) -> Toolbox:
        """The tools of an episode. Of a run's tools, its row may choose."""
        return self._toolbox.only(row[ALLOWED_TOOLS]) if self._selects and ALLOWED_TOOLS in row else self._toolbox

    def _step(self, number: int, text: str, calls: Calls) -> Moved:
        episode = self._episodes[number]
        if not calls and has_step(self._kind):
            return moved(self._result(episode.step(text)), self._limit)
        answered = self._toolboxes[number].answer(episode, calls, self._limit, self._seconds, self._result)
        if has_step(self._kind):
            reward, done = self._since(number, episode) if getattr(self._kind, "rewards_calls", False) else 0.0, False
        else:
            reward, done = self._since(number, episode), not calls or bool(getattr(episode, "done", False))
        return Moved([] if done else [("tool", result) for _, _, result, _, _ in answered], reward, done, calls=answered)

    def _since(self, number: int, episode: Any) -> float:
        """What the attribute `reward` of an episode has gained since the last turn."""
        before, self._rewards[number] = self._rewards[number], finite(getattr(episode, "reward", 0.0), "attribute `reward`")
        return self._rewards[number] - before

    def _result(self, answer: Any) -> Any:
        return self._loop.run_until_complete(answer) if inspect.iscoroutine(answer) else answer


def _reset_arguments(reset: Any, row: dict[str, Any], seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The row and the seed as `reset` takes them: `reset(row)`, `reset(row, seed)`, or the columns by name, `reset(**row)` as TRL has it."""
    parameters = inspect.signature(reset).parameters
    seeded = {"seed": seed} if "seed" in parameters else {}
    kinds = {name: each.kind for name, each in parameters.items()}
    takes_columns = inspect.Parameter.VAR_KEYWORD in kinds.values() and kinds.get("row") in (None, inspect.Parameter.VAR_KEYWORD)
    return ((), {**row, **seeded}) if takes_columns else ((row,), seeded)
