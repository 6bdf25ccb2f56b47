"""The main function of a worker: sets limits, loads the plugins, then scores items.

Invariant: every item gets one reply with its number, in order, unless the process ends. The results, exceptions and output of a
plugin leave the process only in a bounded, validated reply.
"""

import asyncio
import importlib
import os
import socket
import threading
from collections.abc import Callable

import psutil  # type: ignore[import-untyped]

from polyreme.errors import ConfigError
from polyreme.isolation.confinement import confine, limit_memory, summary
from polyreme.isolation.wire import Setup, encode, receive
from polyreme_reward.items import Item, Outcome, RewardError, Status, failed, outcome_of
from polyreme_reward.plugins.load import Loaded, load


def main(channel: socket.socket) -> int:
    """Runs a worker on its socket until the socket closes.

    The first message has `memory_mib` and either `rewards` (sources), or `module`: a module of this package with
    `load(setup, report)` and `run(channel, loaded, setup)`, which replace the loading and scoring of plugins. `report` sends the
    loaded fraction of the weights.

    Returns the exit status.
    """
    setup = receive(channel)
    if setup is None:
        return 0
    output = confine()
    if "module" in setup:
        return _run_module(channel, setup)
    limit_memory(setup["memory_mib"])
    pid = os.getpid()
    try:
        plugins = [load(source) for source in setup["rewards"]]
    except ConfigError as error:
        channel.sendall(encode({"failed": [error.expected, error.found, error.do]}))
        return 2
    except BaseException as error:  # noqa: BLE001 plugin code may raise anything
        channel.sendall(encode({"failed": ["a reward that loads", summary(error), "Fix the plugin."]}))
        return 2
    channel.sendall(encode({"ready": [[plugin.version, plugin.description, plugin.reads_tokens] for plugin in plugins]}))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    left_behind = _leftover_test()
    output.take()
    while (jobs := receive(channel)) is not None:
        for number, index, fields in jobs:
            outcome, memory = _score(plugins[index], Item(*fields), loop)
            if os.getpid() != pid:  # a plugin forked and both processes returned
                return 71
            processes, threads = left_behind()
            reply = [number, outcome.status, outcome.value, outcome.message, dict(outcome.extras), outcome.token_rewards]
            channel.sendall(encode([*reply, memory or processes, memory or processes or threads, output.take()]))
    return 0


def _run_module(channel: socket.socket, setup: Setup) -> int:
    module = importlib.import_module(setup["module"])
    try:
        loaded = module.load(setup, lambda fraction: channel.sendall(encode({"loading": fraction})))
    except ConfigError as error:
        channel.sendall(encode({"failed": [error.expected, error.found, error.do]}))
        return 2
    limit_memory(setup["memory_mib"], beyond=psutil.Process().memory_info().data)
    channel.sendall(encode({"ready": [[loaded.version, loaded.description, False]]}))
    return int(module.run(channel, loaded, setup))


def _score(plugin: Loaded, item: Item, loop: asyncio.AbstractEventLoop) -> tuple[Outcome, bool]:
    """The outcome of the plugin's answer, and whether memory ran out."""
    try:
        answer = plugin.call(item)
        if asyncio.iscoroutine(answer):
            answer = loop.run_until_complete(answer)
        return outcome_of(plugin.unwrap(answer), len(item.token_ids)), False
    except RewardError as error:
        return failed(Status.ERROR, str(error)), False
    except MemoryError:
        return failed(Status.ERROR, "ran out of memory (MemoryError at the worker's limit)"), True
    except SystemExit as error:
        return failed(Status.ERROR, f"called sys.exit({error.code!r})"), False
    except BaseException as error:  # noqa: BLE001 plugin code may raise anything
        return failed(Status.ERROR, summary(error)), False


def _leftover_test() -> Callable[[], tuple[bool, bool]]:
    """A cheap test of whether items have left (processes, threads) behind that did not exist after loading."""
    threads = threading.active_count()
    helpers = _has_children()

    def test() -> tuple[bool, bool]:
        return (not helpers and _has_children()), threading.active_count() > threads

    return test


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
