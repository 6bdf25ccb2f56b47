"""What isolates programs here. Invariant: a mode counts as working when a program that tried to leave its sandbox could not, just now."""

import tempfile
from collections.abc import Sequence

from polyreme.errors import ConfigError
from polyreme_reward.sandbox import landlock, seccomp
from polyreme_reward.sandbox.program import Limits, Mode, SandboxError
from polyreme_reward.sandbox.run import run

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
    """Why a mode does not work here; None: it does."""
    if not seccomp.supported():
        return "no system call numbers are known for this machine"
    if mode is Mode.LANDLOCK and not landlock.version():
        return "the kernel has no Landlock, or it is refused"
    with tempfile.NamedTemporaryFile() as secret:
        try:
            ended = run(mode, {"kind": "script", "program": _PROBE}, secret.name, _LIMITS)
        except SandboxError as error:
            return str(error)
    if ended.well and ended.stdout == b"isolated\n":
        return None
    return (
        f"a program in it was not isolated (ended with status {ended.status}, over: {ended.over}, output: {ended.stdout[:200]!r})"
    )


def choose(unsafe: bool, modes: Sequence[Mode] = (Mode.BUBBLEWRAP, Mode.LANDLOCK)) -> Mode:
    """The first mode that works.

    Args:
        unsafe: run programs without isolation where none works.
        modes: those to try, in order.

    Raises:
        ConfigError: none works, and `unsafe` is not set.
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
        "a sandbox for the programs of the reward `code` (bubblewrap, or Landlock from Linux 5.13)",
        found,
        "Fix: allow user namespaces to the reward service (docs/deploy.md), use a newer kernel, or, where programs cannot be hostile, set "
        "options: {unsafe: true}.",
    )
