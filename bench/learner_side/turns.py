"""Two sides of a comparison that take turns, each in a process of its own.

An order and its figures are one line of JSON each, on the child's standard input and output.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Figures = dict[str, float]


@dataclass(frozen=True)
class Turns:
    """A child process that works on request."""

    child: "subprocess.Popen[str]"

    def take(self, **order: int) -> Figures:
        """The figures of one order. Raises RuntimeError when the child has ended."""
        assert self.child.stdin and self.child.stdout
        self.child.stdin.write(json.dumps(order) + "\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError(f"the child {self.child.args!r} ended")
        figures: Figures = json.loads(line)
        return figures


@contextmanager
def turns(script: Path, *arguments: str) -> Iterator[Turns]:
    """Runs `script` with `arguments` as the only rank of a world, until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    command = [sys.executable, str(script), *arguments]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield Turns(child)
        finally:
            child.kill()


def serve(work: Callable[..., Figures]) -> None:
    """Runs in the child: calls `work` with each order. What else is printed goes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(work(**json.loads(line))), file=answers, flush=True)
