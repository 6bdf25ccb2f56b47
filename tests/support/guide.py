"""The fenced blocks of a page: writes its files and runs its commands.

Invariant: a block is exactly the text of the page. A comment `<!-- not executed: REASON -->` above a block gives the reason why no test
executes it.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.commands import search_path

ROOT = Path(__file__).resolve().parents[2]
_DOCS = ROOT / "docs"
_BLOCK = re.compile(
    r"(?:^<!-- not executed: (?P<reason>[^>]+?) -->\n+)?^```(?P<language>\w*) ?(?P<info>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    """The page's path, relative to the repository."""
    line: int
    language: str
    info: str
    """The text after the language: `file=NAME`, `run`, `check` or nothing."""
    text: str
    reason: str
    """The reason why it is not executed, or nothing."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """The name of the block's file, or nothing."""
        return self.info.removeprefix("file=") if self.info.startswith("file=") else ""


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        name = str(page.relative_to(ROOT))
        found.append(Block(name, line, match["language"], match["info"], match["text"], match["reason"] or ""))
    return found


def write_files(name: str, folder: Path) -> None:
    """Writes each block of docs/`name` that has `file=...` into the folder."""
    for block in blocks(_DOCS / name):
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)


def commands(name: str, info: str = "run") -> list[str]:
    """The `sh` blocks of docs/`name`, in order: those with `run`, or with `info` "" the others."""
    return [block.text for block in blocks(_DOCS / name) if (block.language, block.info) == ("sh", info)]


def run(script: str, folder: Path, timeout: float = 300.0, forks: bool = False) -> str:
    """Runs a block in the folder, with this interpreter's commands on the path. Returns what it printed; fails with it otherwise.

    Args:
        forks: whether `polyreme` runs as a fork (see support/commands.py).
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POLYREME_")}
    environment |= {"PATH": search_path() if forks else f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "160"}
    words = ["bash", "-ec", script]
    done = subprocess.run(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}"
    return done.stdout
