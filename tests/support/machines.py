"""Network namespaces as machines. Each has its own address, loopback and /dev/shm, and a link that can be shaped and cut.

Invariant: nothing outlives the block, and SIGTERM ends it as Ctrl-C does. What a killed process left is removed by the next network: every
name has its owner's pid. Outside the namespaces, only one interface with such a name is added.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from polyreme.experience.embedded_redis import redis_binary
from polyreme.process.lifecycle import Child

NAMESPACES = Path("/run/netns")
RATE = "2500mbit"
BURST = "1mb"  # bytes that may pass at once after a pause; at least the rate's bytes per tick of the kernel's clock
_numbers = count()


@dataclass
class Machine:
    """A namespace with one link: `eth0` in it, `port` at the switch."""

    name: str
    address: str
    switch: str
    port: str

    def command(self, argv: Sequence[str]) -> tuple[str, ...]:
        """`argv` on this machine."""
        inner = f"mount -t tmpfs -o mode=1777 tmpfs /dev/shm && exec {shlex.join(argv)}"
        return (*_inside(self.name), "unshare", "-m", "sh", "-c", inner)

    def shape(self, rate: str = RATE, burst: str = BURST) -> None:
        """Limits the link's rate, each way."""
        for name, device in ((self.name, "eth0"), (self.switch, self.port)):
            _run(*_inside(name), *_shaped(device, rate, burst))

    def cut(self) -> None:
        """Silently drops packets in both directions."""
        _run(*_inside(self.name), "iptables", "-I", "INPUT", "-i", "eth0", "-j", "DROP")
        _run(*_inside(self.name), "iptables", "-I", "OUTPUT", "-o", "eth0", "-j", "DROP")

    def heal(self) -> None:
        _run(*_inside(self.name), "iptables", "-F")


@dataclass
class Network:
    """Machines on one switch (a namespace with a bridge). This process is also on it, at `address`."""

    switch: str
    prefix: str
    """The first three numbers of its addresses. Only our interface leads there."""
    machines: list[Machine] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.prefix}.254"

    def shape(self, rate: str, burst: str = BURST) -> None:
        """Limits the rate of this process's link, each way."""
        _run(*_shaped(self.switch, rate, burst))
        _run(*_inside(self.switch), *_shaped("port0", rate, burst))

    def sent_bytes(self) -> int:
        """Bytes that this process's link has sent so far, including headers."""
        return int(Path(f"/sys/class/net/{self.switch}/statistics/tx_bytes").read_text())

    def add(self) -> Machine:
        number = len(self.machines) + 1
        machine = Machine(f"{self.switch}m{number}", f"{self.prefix}.{number}", self.switch, f"port{number}")
        self.machines.append(machine)
        _run("ip", "netns", "add", machine.name)
        _plug(self.switch, machine.port, "eth0", machine.name)
        inside = ("ip", "-n", machine.name)
        _run(*inside, "addr", "add", f"{machine.address}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        _run(*inside, "link", "set", "lo", "up")
        return machine


@contextmanager
def network() -> Iterator[Network]:
    """A switch and its machines, removed at the end of the block. Several networks on one host have different addresses."""
    _remove_those_of_the_dead()
    drawn = uuid.uuid4().bytes
    net = Network(f"ply{os.getpid()}-{next(_numbers)}", f"10.{200 + drawn[0] % 50}.{drawn[1]}")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the blocks that are open are left in order
    try:
        _run("ip", "netns", "add", net.switch)
        _run("ip", "-n", net.switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", net.switch, "link", "set", "bridge", "up")
        _plug(net.switch, "port0", net.switch, None)
        _run("ip", "addr", "add", f"{net.address}/24", "dev", net.switch)
        _run("ip", "link", "set", net.switch, "up")
        yield net
    finally:
        for name in (*(machine.name for machine in net.machines), net.switch):
            _remove(name)
        signal.signal(signal.SIGTERM, before)


@asynccontextmanager
async def redis_on(machine: Machine, folder: Path) -> AsyncIterator[str]:
    """Runs a Redis server on the machine's address. Yields its URL."""
    (folder / "redis").mkdir()
    options = {"bind": machine.address, "port": "6379", "protected-mode": "no", "dir": str(folder / "redis"), "save": ""}
    needed = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
    words = [word for name, value in (options | needed).items() for word in (f"--{name}", value)]
    child = Child.spawn("redis", machine.command((redis_binary(), *words)), log_path=folder / "redis.log")
    try:
        yield f"redis://{machine.address}:6379"
    finally:
        await child.stop(10)


def missing() -> str:
    """The reason why such machines cannot be created here, or nothing."""
    tools = [tool for tool in ("ip", "tc", "iptables", "unshare") if shutil.which(tool) is None]
    if tools:
        return f"needs the commands {', '.join(tools)}"
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    try:
        with network() as net:
            machine = net.add()
            machine.shape()
            machine.cut()
            _run(*machine.command(["true"]))
    except subprocess.CalledProcessError as error:
        return f"the kernel or its guard refuses `{shlex.join(error.cmd)}`: {error.stderr.strip()}"
    return ""


def _remove_those_of_the_dead() -> None:
    for path in NAMESPACES.glob("ply*-*"):
        if not psutil.pid_exists(int(path.name.removeprefix("ply").split("-")[0])):
            _remove(path.name)


def _remove(namespace: str) -> None:
    """Removes a namespace with its end of each link, and thereby also the other end."""
    subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def _shaped(device: str, rate: str, burst: str) -> tuple[str, ...]:
    return ("tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", burst, "latency", "50ms")


def _inside(namespace: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", namespace)


def _plug(switch: str, port: str, device: str, namespace: str | None) -> None:
    """Connects `device` in `namespace` (None: this process's) to the switch's bridge."""
    place = ("netns", namespace or str(os.getpid()))
    _run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", device, *place)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=300)
