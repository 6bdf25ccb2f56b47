"""The worker's side of its calls: makes many at once.

Coroutines are tasks of the event loop of the main thread; what else takes time runs in a `CallThread`.

Invariant: a call has one reply with its number when it ends, unless the process ends. A call that is cancelled and does not end
is reported as stuck; a call that blocks the event loop is named by the thread that reads the socket, which nothing but a held
interpreter lock blocks. The results, exceptions and output of user code leave the process only in bounded replies.
"""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from queue import SimpleQueue
from typing import Any

from polyreme.errors import ConfigError
from polyreme.isolation.confinement import BoundedOutput, confine, limit_memory, summary
from polyreme.isolation.wire import encode, receive
from polyreme_environment.contract import ContractError, LostError

_STACK_BYTES = 2 << 20
"""Of each thread. It counts as data memory, whose limit the default of 8 MiB would exhaust."""
Call = dict[str, Any]
Setup = Call
"""The first message."""
Answer = Callable[[Call], Awaitable[Mapping[str, object]]]
"""Makes a call. Returns the fields of its reply."""


def serve_calls(channel: socket.socket, what: str, load: Callable[[Setup], tuple[str, str, Answer]]) -> int:
    """Runs a worker on its socket until the socket closes. Returns the exit status.

    The first message has `memory_mib` and what `load` needs. Then each message is a call with its `number`, or `number` and
    `cancel`, the seconds after which it is reported as stuck.

    Args:
        what: is loaded, for messages.
        load: loads it: version, description, and what makes the calls. May raise anything.
    """
    setup = receive(channel)
    if setup is None:
        return 0
    output = confine()
    limit_memory(setup["memory_mib"])
    threading.stack_size(_STACK_BYTES)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        version, about, answer = load(setup)
    except ConfigError as error:
        channel.sendall(encode({"failed": [error.expected, error.found, error.do]}))
        return 2
    except BaseException as error:  # noqa: BLE001 user code may raise anything
        channel.sendall(encode({"failed": [f"{what} that loads", summary(error), "Fix the file."]}))
        return 2
    channel.sendall(encode({"ready": [[version, about, False]]}))
    output.take()
    server = _CallServer(channel, loop, output, answer)
    threading.Thread(target=server.receive, daemon=True).start()
    loop.run_forever()
    return 0


class CallThread:
    """A thread that runs one function after the other, until `end`. (An executor costs several times as much.)"""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def run(self, function: Callable[[], object]) -> object:
        """What a function returns or raises in the thread. It ends when the function does, also if it is cancelled."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

        def work() -> None:
            try:
                outcome: tuple[object, BaseException | None] = function(), None
            except BaseException as error:  # noqa: BLE001 not every exception can be set on a future
                outcome = None, error
            loop.call_soon_threadsafe(ended.set_result, outcome)

        self._work.put(work)
        try:
            result, error = await asyncio.shield(ended)
        except asyncio.CancelledError:
            await asyncio.wait({ended})
            raise
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """No function follows."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class _CallServer:
    def __init__(self, channel: socket.socket, loop: asyncio.AbstractEventLoop, output: BoundedOutput, answer: Answer) -> None:
        self._channel, self._loop, self._output, self._answer = channel, loop, output, answer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sending = threading.Lock()

    def receive(self) -> None:
        """Starts and cancels calls until the socket closes; then ends the event loop. In a thread."""
        try:
            while (call := receive(self._channel)) is not None:
                if "cancel" not in call:
                    self._loop.call_soon_threadsafe(self._start, call)
                    continue
                inside = asyncio.current_task(self._loop)
                self._send({"inside": None if inside is None or not inside.get_name().isdigit() else int(inside.get_name())})
                self._loop.call_soon_threadsafe(self._cancel, call["number"], call["cancel"])
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _start(self, call: Call) -> None:
        number = call["number"]
        self._tasks[number] = self._loop.create_task(self._make(number, call), name=str(number))

    def _cancel(self, number: int, seconds: float) -> None:
        if (task := self._tasks.get(number)) is not None:
            self._loop.call_soon(task.cancel)  # one that has just begun must come as far as its `try`
            self._loop.call_later(seconds, self._say_stuck, number)

    def _say_stuck(self, number: int) -> None:
        if number in self._tasks:
            self._send({"stuck": number})

    async def _make(self, number: int, call: Call) -> None:
        try:
            reply = dict(await self._answer(call))
        except LostError as error:
            reply = {"lost": str(error)}
        except ContractError as error:
            reply = {"error": str(error)}
        except SystemExit as error:
            reply = {"error": f"called sys.exit({error.code!r})"}
        except BaseException as error:  # noqa: BLE001 user code may raise anything, and a cancelled call has a reply too
            reply = {"error": summary(error)}
        del self._tasks[number]
        self._send({"number": number, **reply, "printed": self._output.take()})

    def _send(self, message: dict[str, object]) -> None:
        with self._sending:
            self._channel.sendall(encode(message))
