"""Verdicts on a machine: one for each measured fact, with advice.

A service adds its own through the entry-point group `polyreme.doctor`: a function of the wanted device ("cpu", "cuda", "npu") that
yields verdicts.

Invariant: a verdict is a pure function of measured facts, so it is the same on every machine with these facts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

GIB = 2**30
_PYTHONS = ((3, 11), (3, 12))
_SHARED_GIB, _DISK_GIB, _FILES = 1.0, 10.0, 4096


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
    """Checks that /dev/shm can hold an arena. free, total: bytes."""
    found = f"{free / GIB:,.1f} GiB free of {total / GIB:,.1f}"
    advice = "Enlarge it to three times the model's weights (docker: shm_size; kubernetes: an emptyDir with medium Memory)."
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


def memory_verdict(limit: int) -> Verdict:
    """Reports the memory of this machine or container. limit: bytes."""
    return Verdict("ok", "memory", f"{limit / GIB:,.1f} GiB (`polyreme config check --memory` prints what a run needs)")


def files_verdict(limit: int) -> Verdict:
    """Checks that a process may open enough files and sockets."""
    if limit >= _FILES:
        return Verdict("ok", "open files", f"{limit:,} for each process")
    return Verdict("note", "open files", f"{limit:,} for each process", f"Raise it: ulimit -n {_FILES}.")


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
