"""The progress of an installation by uv, from the lines that it prints without a terminal.

Invariant: uses only the standard library, since it runs before anything is installed.
"""

import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

LINE_SECONDS = 10.0
"""Minimum seconds between two lines if stdout is not a terminal."""
REDRAW_SECONDS = 0.5

_UNITS = {"B": 1 / 1024**2, "KiB": 1 / 1024, "MiB": 1.0, "GiB": 1024.0}
_DOWNLOADING = re.compile(r"Downloading (\S+) \(([\d.]+)(B|KiB|MiB|GiB)\)")
_DOWNLOADED = re.compile(r"Downloaded (\S+)")
_COUNTED = re.compile(r"(Resolved|Prepared|Installed|Uninstalled|Audited|Checked) (\d+) packages? in")
_IN_PASSING = re.compile(r"(Using |Building |Built |Updating |Updated |[+~-] \S+==)")


@dataclass
class Installation:
    """The state of an installation from uv's lines so far.

    Attributes:
        began: start time, in seconds of the clock of `line`.
        announced: size of each download in MiB. uv announces those above 1 MiB, nearly all of them in the first seconds.
        downloaded: the names of complete downloads.
        counts: number of packages by step: Resolved, Prepared, Installed.
    """

    began: float
    announced: dict[str, float] = field(default_factory=dict)
    downloaded: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, line: str) -> bool:
        """Adds a line of uv. Returns whether it is about progress; other lines are warnings and errors."""
        line = line.strip()
        if match := _DOWNLOADING.match(line):
            self.announced[match[1]] = float(match[2]) * _UNITS[match[3]]
        elif match := _DOWNLOADED.match(line):
            self.downloaded.add(match[1])
        elif match := _COUNTED.match(line):
            self.counts[match[1]] = int(match[2])
        else:
            return not line or bool(_IN_PASSING.match(line))
        return True

    def line(self, now: float) -> str:
        """One line of text about the state at the time `now`."""
        passed = now - self.began
        if "Installed" in self.counts or "Audited" in self.counts or "Checked" in self.counts:
            done = self.counts.get("Installed", 0)
            return f"{_packages(done)} installed in {_duration(passed)}" if done else "everything is installed already"
        if "Prepared" in self.counts:
            return f"{_packages(self.counts['Prepared'])} ready, copying them; {_duration(passed)} so far"
        if not self.announced:
            return f"{_packages(self.counts.get('Resolved', 0))} to install; {_duration(passed)} so far"
        done, total = sum(self.announced.get(name, 0.0) for name in self.downloaded), sum(self.announced.values())
        text = f"{len(self.downloaded)} of {len(self.announced)} downloads, {done:.0f} of {total:.0f} MiB, "
        if not done:
            return text + f"{_duration(passed)} so far"
        return text + f"remaining about {_duration(passed * (total - done) / done)}"


def run_with_progress(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs uv and shows its progress on stdout: one changing line on a terminal, otherwise a line at intervals. Other output goes to
    stderr.
    Returns the exit status."""
    lines: SimpleQueue[str | None] = SimpleQueue()
    state, terminal, shown = Installation(time.monotonic()), sys.stdout.isatty(), time.monotonic()
    with subprocess.Popen(command, env={**environment, "NO_COLOR": "1"}, stderr=subprocess.PIPE, text=True) as process:
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=REDRAW_SECONDS)
                if line is None:
                    break
                if not state.add(line):
                    print(("\r\x1b[2K" if terminal else "") + line, end="", file=sys.stderr, flush=True)
            except Empty:
                pass
            now = time.monotonic()
            if now - shown >= (REDRAW_SECONDS if terminal else LINE_SECONDS):
                shown = now
                _show(state.line(now), terminal)
    if process.returncode == 0:
        _show(state.line(time.monotonic()), terminal)
    if terminal:
        print()
    return process.returncode


def _read(process: "subprocess.Popen[str]", lines: "SimpleQueue[str | None]") -> None:
    assert process.stderr is not None
    for line in process.stderr:
        lines.put(line)
    lines.put(None)


def _show(text: str, terminal: bool) -> None:
    if terminal:
        print(f"\r\x1b[2K  {text[: shutil.get_terminal_size().columns - 3]}", end="", flush=True)
    else:
        print(f"  {text}", flush=True)


def _packages(count: int) -> str:
    return f"{count} package" + ("" if count == 1 else "s")


def _duration(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
