"""Runs commands as another user, from tests that run as root. Needs bubblewrap and setpriv."""

import os
import shutil
import sys
from pathlib import Path

from polyreme.isolation.sandbox import bubblewrap

ROOT = Path(__file__).resolve().parents[2]
SERVICE_USER = 10001
"""The user id of the images."""


def as_user(uid: int, argv: list[str]) -> list[str] | None:
    """The command under another user id, without privileges, with access to Python and this repository; None: not possible here.

    A directory that other users cannot enter, such as /root, is replaced by one with only the required content.
    """
    wrap = bubblewrap.executable()
    if os.geteuid() != 0 or wrap is None or shutil.which("setpriv") is None:
        return None
    line = [wrap, "--dev-bind", "/", "/"]
    needed = [Path(os.path.realpath(sys.executable)).parents[1], Path(sys.prefix), ROOT]
    for closed in {parent for path in needed for parent in path.parents if not parent.stat().st_mode & 0o001}:
        line += ["--tmpfs", str(closed)]
    for path in needed:
        for parent in [*reversed(path.parents)][1:]:
            line += ["--dir", str(parent)]  # other users cannot enter a parent that bubblewrap itself creates
        line += ["--ro-bind", str(path), str(path)]
    ids = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
    return [*line, "--chdir", str(ROOT / "tests"), "--", "setpriv", *ids, *argv]
