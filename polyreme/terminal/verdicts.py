"""Verdicts on a machine: one for each measured fact, with advice.

A service adds its own through the entry-point group `polyreme.doctor`: a function of the wanted device ("cpu", "cuda", "npu")
that yields verdicts.

Invariant: a verdict is a pure function of measured facts, so it is the same on every machine with these facts.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

GIB = 2**30
_PYTHONS = ((3, 11), (3, 12), (3, 13))
_SHARED_GIB, _DISK_GIB, _TEMP_GIB, _FILES = 1.0, 10.0, 0.5, 4096
_RELEASED = 1_760_000_000
"""No clock that is set shows an earlier time, in Unix seconds."""


@dataclass(frozen=True)
class Verdict:
    """One line of `polyreme doctor`.

    Attributes:
        level: "ok", "note" (works, with a limit) or "missing" (a run of the wanted kind cannot start).
        subject: the fact, such as "/dev/shm".
        found: what was found.
        do: what to do; empty when nothing needs to be done.
    """

    level: Literal["ok", "note", "missing"]
    subject: str
    found: str
    do: str = ""

    @property
    def line(self) -> str:
        return f"{self.level:<8} {self.subject:<14} {self.found}" + (f". {self.do}" if self.do else "")


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """0 when nothing is missing, else 1."""
    return int(any(verdict.level == "missing" for verdict in verdicts))


def installed_version(package: str) -> str | None:
    """The version of a package; None when it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def python_verdict(version: tuple[int, int]) -> Verdict:
    """Checks that the services run on this version of Python."""
    found = ".".join(map(str, version))
    if version in _PYTHONS:
        return Verdict("ok", "python", found)
    wanted = " or ".join(".".join(map(str, each)) for each in _PYTHONS)
    return Verdict("missing", "python", found, f"Use Python {wanted}.")


def packages_verdict(subject: str, versions: Mapping[str, str | None], install: str) -> Verdict:
    """Checks that a part's packages are installed.

    Args:
        versions: the version of each package, None if it is not installed.
        install: the command that installs them.
    """
    absent = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    if not absent:
        return Verdict("ok", subject, found)
    return Verdict("missing", subject, f"no {', '.join(absent)}" + (f"; {found}" if found else ""), install)


def shared_memory_verdict(free: int, total: int) -> Verdict:
    """Checks that /dev/shm can hold an arena. free, total: bytes; 0 when there is none."""
    found = f"{free / GIB:,.1f} GiB free of {total / GIB:,.1f}" if total else "none"
    advice = "Give it three times the model's weights (docker: shm_size; kubernetes: an emptyDir with medium Memory)."
    if free >= _SHARED_GIB * GIB:
        return Verdict("ok", "/dev/shm", found)
    return Verdict("missing" if free < 2**26 else "note", "/dev/shm", found, advice)


def disk_verdict(path: str, free: int) -> Verdict:
    """Checks that checkpoints fit on the disk of the runs. free: bytes."""
    found = f"{free / GIB:,.1f} GiB free at {path}"
    if free >= _DISK_GIB * GIB:
        return Verdict("ok", "disk", found)
    return Verdict(
        "note", "disk", found, "Set output_dir to a larger disk: a checkpoint takes up to 18 bytes for each parameter."
    )


def hub_verdict(endpoint: str, cache: str, failure: str | None) -> Verdict:
    """Reports whether models and data can be named.

    Args:
        endpoint: the hub's address.
        cache: the directory of what was downloaded before.
        failure: why the hub does not answer; None: it does.
    """
    if failure is None:
        return Verdict("ok", "hub", f"{endpoint} answers; cache in {cache}")
    advice = f"Names of models and data (owner/name) are found only in the cache, {cache}; local paths need no hub."
    return Verdict("note", "hub", f"{endpoint}: {failure}", advice)


def memory_verdict(limit: int) -> Verdict:
    """Reports the memory of this machine or container. limit: bytes."""
    return Verdict("ok", "memory", f"{limit / GIB:,.1f} GiB (`polyreme config check --memory` prints what a run needs)")


def files_verdict(limit: int) -> Verdict:
    """Checks that a process may open enough files and sockets."""
    if limit >= _FILES:
        return Verdict("ok", "open files", f"{limit:,} for each process")
    return Verdict("note", "open files", f"{limit:,} for each process", f"Raise it: ulimit -n {_FILES}.")


def loopback_verdict(address: str | None, failure: str = "") -> Verdict:
    """Checks that processes of this machine can connect. address: of loopback; None: there is none, for the reason `failure`."""
    if address is None:
        return Verdict("missing", "loopback", failure, "Start it: `ip link set lo up`.")
    if ":" in address:
        return Verdict(
            "note",
            "loopback",
            address,
            "There is no 127.0.0.1: programs of others may need it (`ip addr add 127.0.0.1/8 dev lo`).",
        )
    return Verdict("ok", "loopback", address)


@dataclass(frozen=True)
class TempFacts:
    """The directory of temporary files.

    Attributes:
        wanted: TMPDIR, or '' if it is not set.
        root: the directory with room for the sockets of a replica; None: there is none.
        free: bytes that are free in `root`.
        noexec: whether no program in `root` may be executed.
    """

    wanted: str
    root: str | None
    free: int = 0
    noexec: bool = False


def temp_verdict(facts: TempFacts) -> Verdict:
    """Checks the directory of temporary files."""
    if facts.root is None:
        return Verdict(
            "missing", "TMPDIR", facts.wanted or "no writable directory", "Set TMPDIR to a writable directory, such as /tmp."
        )
    found = f"{facts.root}, {facts.free / GIB:,.1f} GiB free"
    if facts.free < _TEMP_GIB * GIB:
        return Verdict("note", "TMPDIR", found, "Free disk space there, or set TMPDIR to a directory on another disk.")
    if facts.noexec:
        return Verdict(
            "note", "TMPDIR", f"{found}, mounted noexec", "Set TMPDIR to a directory where compiled kernels can be loaded."
        )
    if facts.wanted and facts.wanted != facts.root:
        reason = f"{found}, in place of {facts.wanted}, which is too long for sockets, or not a writable directory"
        return Verdict("note", "TMPDIR", reason, "Set TMPDIR to a shorter or writable one if these files must be there.")
    return Verdict("ok", "TMPDIR", found)


def clock_verdict(now: float) -> Verdict:
    """Checks that the clock is set. now: Unix time in seconds."""
    shown = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    if now >= _RELEASED:
        return Verdict("ok", "clock", shown)
    return Verdict("note", "clock", shown, "Set it: certificates are checked against it, and records are ordered by it.")


def redis_verdict(where: str, failure: str | None, exposure: str = "") -> Verdict:
    """Checks that Redis keeps every write, and that it asks for a password.

    Args:
        failure: why it does not keep them, with advice; None when it does.
        exposure: who can command it without a password; '' when nobody can.
    """
    if failure is None and exposure:
        return Verdict("note", "redis", where, exposure)
    if failure is None:
        return Verdict("ok", "redis", f"{where}, every write is on disk before its answer")
    return Verdict("missing", "redis", where, failure)


def port_verdict(port: int, failure: str | None) -> Verdict:
    """Checks that a port can be bound. failure: why it cannot, with advice; None when it can."""
    if failure is None:
        return Verdict("ok", f"port {port}", "free")
    return Verdict("missing", f"port {port}", "taken", failure)
