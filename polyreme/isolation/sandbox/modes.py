"""Finds a mode of isolation that works on this machine.

Invariant: a mode counts as working only after a program has tried to leave its sandbox and failed.
"""

import tempfile
from collections.abc import Sequence

from polyreme.errors import ConfigError
from polyreme.isolation.sandbox import landlock, seccomp
from polyreme.isolation.sandbox.program import Limits, Mode, SandboxError
from polyreme.isolation.sandbox.run import run

_PROBE = """
import os, socket, sys

def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError:
        return True
    return False

secret = sys.stdin.read()
if refused(open, secret) and refused(os.fork) and refused(socket.socket):
    open("file", "w").close()
    print("isolated")
"""
_LIMITS = Limits(seconds=20.0, memory_mib=256)


def why_not(mode: Mode) -> str | None:
    """Why a mode does not work on this machine, or None when it works."""
    if not seccomp.supported():
        return "the system call numbers of this architecture are unknown"
    if mode is Mode.LANDLOCK and not landlock.version():
        return "the kernel does not provide Landlock"
    with tempfile.NamedTemporaryFile() as secret:
        try:
            ended = run(mode, {"kind": "script", "program": _PROBE}, secret.name, _LIMITS)
        except SandboxError as error:
            return str(error)
    if ended.well and ended.stdout == b"isolated\n":
        return None
    return (
        f"a test program was not isolated (exit status {ended.status}, broken limit: {ended.over}, output:"
        f" {ended.stdout[:200]!r})"
    )


def choose(
    unsafe: bool,
    modes: Sequence[Mode] = (Mode.BUBBLEWRAP, Mode.LANDLOCK),
    needs: str = "the reward `code`",
    service: str = "reward",
    option: str = "options: {unsafe: true}",
) -> Mode:
    """The first mode that works.

    Args:
        unsafe: run programs without isolation when no mode works.
        modes: the modes to try, in order.
        needs, service, option: what needs a sandbox, in which service, and what sets `unsafe`, for the message.

    Raises:
        ConfigError: no mode works, and `unsafe` is not set.
    """
    reasons = {}
    for mode in modes:
        if (reason := why_not(mode)) is None:
            return mode
        reasons[mode] = reason
    if unsafe:
        return Mode.NONE
    found = "; ".join(f"{mode}: {reason}" for mode, reason in reasons.items()) or "none was tried"
    raise ConfigError(
        f"a sandbox for {needs} (bubblewrap, or Landlock from Linux 5.13)",
        found,
        f"Allow user namespaces for the {service} service (docs/deploy.md), use a newer kernel, or, for trusted programs, set "
        f"{option}.",
    )
