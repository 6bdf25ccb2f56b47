"""Machines as network namespaces disappear with the process that made them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.guide import ROOT
from support.machines import NAMESPACES, missing, network

OWNER = """
import time
from support.machines import network

with network() as net:
    net.add()
    print(net.switch, flush=True)
    while True:  # a signal that comes just before a sleep is handled after it
        time.sleep(0.05)
"""


@pytest.fixture(autouse=True, scope="module")
def possible() -> None:
    if reason := missing():
        pytest.skip(f"network namespaces are not to be had: {reason}")


def ended_by(number: signal.Signals) -> str:
    """Ends a process with a network by a signal. Returns the name that its namespaces begin with, the name of its interface."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT / "tests"
    ) as owner:
        try:
            assert owner.stdout is not None
            switch = owner.stdout.readline().decode().strip()
            assert len(namespaces(switch)) == 2
            owner.send_signal(number)
            owner.communicate(timeout=300)
        finally:
            owner.kill()
    return switch


def namespaces(switch: str) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{switch}*")]


def await_no_interface(switch: str) -> None:
    """The kernel removes the interfaces of a removed namespace a little later."""
    deadline = time.monotonic() + 300
    while Path("/sys/class/net", switch).exists():
        assert time.monotonic() < deadline, f"{switch} is still there"
        time.sleep(0.05)


def test_a_terminated_process_removes_its_machines() -> None:
    switch = ended_by(signal.SIGTERM)
    assert namespaces(switch) == []
    await_no_interface(switch)


def test_the_next_network_removes_the_machines_of_a_killed_process_and_no_others() -> None:
    with network() as living:
        living.add()
        switch = ended_by(signal.SIGKILL)
        assert len(namespaces(switch)) == 2
        with network():
            assert namespaces(switch) == []
            assert len(namespaces(living.switch)) == 2
        await_no_interface(switch)
