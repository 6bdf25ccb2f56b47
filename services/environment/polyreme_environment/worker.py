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
from polyreme.errors import ConfigError
from polyreme.isolation.confinement import confine, limit_memory, summary
from polyreme.isolation.wire import encode, receive
from polyreme_environment.contract import ContractError, Moved, begun, choose, moved


def main(channel: socket.socket) -> int:
    """Runs a worker on its socket until the socket closes. Returns the exit status.

    The first message has `path`, `code`, `name`, `options`, `memory_mib` and `max_chars`. Then each message is a call: `number`, `episode`, and
    `reset` ([row, seed]), `step` (a text) or `close`. Its reply has `number` and either `messages`, `reward`, `done` and `parts`, or `error`.
    """
    setup = receive(channel)
    if setup is None:
        return 0
    output = confine()
    limit_memory(setup["memory_mib"])
    try:
        module = load_module(setup["path"], setup["code"])
        kind = choose(_own_classes(module), setup["name"], setup["path"])
        inspect.signature(kind).bind(**setup["options"])
    except ConfigError as error:
        channel.sendall(encode({"failed": [error.expected, error.found, error.do]}))
        return 2
    except BaseException as error:  # noqa: BLE001 user code may raise anything
        channel.sendall(encode({"failed": ["an environment that loads", summary(error), "Fix the file."]}))
        return 2
    digest = hashlib.sha256(repr([setup["code"], setup["name"], setup["options"]]).encode()).hexdigest()[:12]
    about = (inspect.getdoc(kind) or kind.__name__).partition("\n")[0]
    channel.sendall(encode({"ready": [[f"{kind.__name__}-{digest}", about, False]]}))
    player = Player(kind, setup["options"], setup["max_chars"])
    output.take()
    while (call := receive(channel)) is not None:
        channel.sendall(encode({"number": call["number"], **player.call(call), "printed": output.take()}))
    return 0


class Player:
    """Plays the episodes of a worker. `limit`: characters that one call may return."""

    def __init__(self, kind: Any, options: dict[str, Any], limit: int) -> None:
        self._kind, self._options, self._limit = kind, options, limit
        self._episodes: dict[int, Any] = {}
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)

    def call(self, call: dict[str, Any]) -> dict[str, Any]:
        """The reply to one call, without its number."""
        try:
            return vars(self._played(call))
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
            episode = self._episodes[number] = self._kind(**self._options)
            seeded = {"seed": seed} if "seed" in inspect.signature(episode.reset).parameters else {}
            return Moved(begun(self._result(episode.reset(row, **seeded)), self._limit))
        if "step" in call:
            return moved(self._result(self._episodes[number].step(call["step"])), self._limit)
        episode = self._episodes.pop(number, None)
        if (close := getattr(episode, "close", None)) is not None:
            self._result(close())
        return Moved()

    def _result(self, answer: Any) -> Any:
        return self._loop.run_until_complete(answer) if inspect.iscoroutine(answer) else answer


def _own_classes(module: Any) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
