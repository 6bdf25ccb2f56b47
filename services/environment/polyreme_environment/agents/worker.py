"""The main function of a worker that runs an agent's function: sets limits, loads the function, then runs it, many times at once.

Invariant: every run gets one reply with its number when it ends, unless the process ends. A function runs in a thread of its own; a coroutine
function is a task of one event loop, and ends when it is cancelled.
"""

import asyncio
import hashlib
import inspect
import socket
import threading
from collections.abc import Callable
from typing import Any

from polyreme.config.python_source import load_module
from polyreme.errors import ConfigError
from polyreme.isolation.confinement import BoundedOutput, confine, limit_memory, summary
from polyreme.isolation.wire import encode, receive
from polyreme_environment.agents.result import read_result
from polyreme_environment.contract import ContractError

_STACK_BYTES = 2 << 20
"""Of each thread. It counts as data memory, whose limit the default of 8 MiB would exhaust."""


def main(channel: socket.socket) -> int:
    """Runs a worker on its socket until the socket closes. Returns the exit status.

    The first message has `path`, `code`, `function`, `options` and `memory_mib`. Then each message is `number` with `run` ([task, base_url,
    api_key]) or `cancel`. The reply to a run has `number` and either `reward` and `metrics`, or `error`.
    """
    setup = receive(channel)
    if setup is None:
        return 0
    output = confine()
    limit_memory(setup["memory_mib"])
    threading.stack_size(_STACK_BYTES)
    try:
        function = _load(setup)
    except ConfigError as error:
        channel.sendall(encode({"failed": [error.expected, error.found, error.do]}))
        return 2
    except BaseException as error:  # noqa: BLE001 user code may raise anything
        channel.sendall(encode({"failed": ["an agent that loads", summary(error), "Fix the file."]}))
        return 2
    digest = hashlib.sha256(repr([setup["code"], setup["function"], setup["options"]]).encode()).hexdigest()[:12]
    about = (inspect.getdoc(function) or setup["function"]).partition("\n")[0]
    channel.sendall(encode({"ready": [[f"{setup['function']}-{digest}", about, False]]}))
    runner = _Runner(channel, function, setup["options"], output)
    output.take()
    while (call := receive(channel)) is not None:
        if "run" in call:
            runner.start(call["number"], call["run"])
        else:
            runner.cancel(call["number"])
    return 0


def _load(setup: dict[str, Any]) -> Callable[..., Any]:
    module, name = load_module(setup["path"], setup["code"]), setup["function"]
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"a function {name} in {setup['path']}", "none", "Fix environment.function.")
    try:
        inspect.signature(function).bind({}, "", "", **setup["options"])
    except TypeError as error:
        where = f"a function {name}(task, base_url, api_key) that also takes environment.options"
        raise ConfigError(where, str(error), "Fix the function, or the options.") from None
    return function


class _Runner:
    """Starts runs and sends their replies."""

    def __init__(
        self, channel: socket.socket, function: Callable[..., Any], options: dict[str, Any], output: BoundedOutput
    ) -> None:
        self._channel, self._function, self._options, self._output = channel, function, options, output
        self._sending = threading.Lock()
        self._tasks: dict[int, Any] = {}
        self._loop = asyncio.new_event_loop()
        if inspect.iscoroutinefunction(function):
            threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def start(self, number: int, arguments: list[Any]) -> None:
        if inspect.iscoroutinefunction(self._function):
            self._tasks[number] = asyncio.run_coroutine_threadsafe(self._run_task(number, arguments), self._loop)
        else:
            threading.Thread(target=self._run, args=(number, arguments), daemon=True).start()

    def cancel(self, number: int) -> None:
        if (task := self._tasks.pop(number, None)) is not None:
            task.cancel()

    def _run(self, number: int, arguments: list[Any]) -> None:
        try:
            reply = vars(read_result(self._function(*arguments, **self._options)))
        except BaseException as error:  # noqa: BLE001 user code may raise anything
            reply = {"error": _shown(error)}
        self._send(number, reply)

    async def _run_task(self, number: int, arguments: list[Any]) -> None:
        try:
            reply = vars(read_result(await self._function(*arguments, **self._options)))
        except BaseException as error:  # noqa: BLE001 user code may raise anything, and a cancelled task must reply too
            reply = {"error": _shown(error)}
        self._tasks.pop(number, None)
        self._send(number, reply)

    def _send(self, number: int, reply: dict[str, Any]) -> None:
        with self._sending:
            self._channel.sendall(encode({"number": number, **reply, "printed": self._output.take()}))


def _shown(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r})"
    return str(error) if isinstance(error, ContractError) else summary(error)
