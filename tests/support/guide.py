"""The fenced blocks of a guide: its files are written, its commands are run."""

import os
import re
import subprocess
import sys
from pathlib import Path

from support.commands import search_path

_BLOCK = re.compile(r"^```(\w+) ?([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DOCS = Path(__file__).resolve().parents[2] / "docs"


def write_files(name: str, folder: Path) -> None:
    """Writes each block of docs/`name` that has `file=...` into the folder."""
    for _, info, text in _BLOCK.findall((_DOCS / name).read_text()):
        if info.startswith("file="):
            (folder / info.removeprefix("file=")).write_text(text)


def commands(name: str, info: str = "run") -> list[str]:
    """The `sh` blocks of docs/`name`, in order: those to run, or with `info` "" those that are for another moment."""
    blocks = _BLOCK.findall((_DOCS / name).read_text())
    return [text for language, found, text in blocks if (language, found) == ("sh", info)]


def run(script: str, folder: Path, timeout: float = 300.0, forks: bool = False) -> str:
    """Runs a block in the folder, with this interpreter's commands on the path. Returns what it printed; fails with it otherwise.

    Args:
        forks: whether `polyreme` is a fork (see support/commands.py).
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POLYREME_")}
    environment |= {"PATH": search_path() if forks else f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "160"}
    words = ["bash", "-ec", script]
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}"
    return done.stdout
