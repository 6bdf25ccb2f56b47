"""The main function of a worker that runs an agent's function, many times at once: loads the function, then runs it.

Invariant: a function runs in a thread of its own; a coroutine function is a task of the event loop, and ends when cancelled.
"""

import hashlib
import inspect
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from polyreme.config.python_source import load_module
from polyreme.errors import ConfigError
from polyreme_environment.agents.result import read_result
from polyreme_environment.call_server import Answer, Call, CallThread, Setup, serve_calls


def main(channel: socket.socket) -> int:
    """Runs a worker on its socket until the socket closes. Returns the exit status.

    The first message has `path`, `code`, `function`, `options` and `memory_mib`. Then each call has `run` ([task, base_url,
    api_key]). The reply has either `reward` and `metrics`, or `error`.
    """
    return serve_calls(channel, "an agent", _load)


def _load(setup: Setup) -> tuple[str, str, Answer]:
    module, name = load_module(setup["path"], setup["code"]), setup["function"]
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"a function {name} in {setup['path']}", "none", "Fix environment.function.")
    try:
        inspect.signature(function).bind({}, "", "", **setup["options"])
    except TypeError as error:
        where = f"a function {name}(task, base_url, api_key) that also takes environment.options"
        raise ConfigError(where, str(error), "Fix the function, or the options.") from None
    digest = hashlib.sha256(repr([setup["code"], name, setup["options"]]).encode()).hexdigest()[:12]
    about = (inspect.getdoc(function) or name).partition("\n")[0]
    return f"{name}-{digest}", about, partial(_run, function, setup["options"])


async def _run(function: Callable[..., Any], options: Mapping[str, object], call: Call) -> Mapping[str, object]:
    run = partial(function, *call["run"], **options)
    if inspect.iscoroutinefunction(function):
        return vars(read_result(await run()))
    thread = CallThread()
    try:
        return vars(read_result(await thread.run(run)))
    finally:
        thread.end()
