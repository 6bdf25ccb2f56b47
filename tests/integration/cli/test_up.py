"""`polyreme up` itself, with its own Redis; small processes stand in for the services and the trainer that it starts."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.waiting import wait_until

CHILD = """#!{python}
import os, pathlib, signal, sys, time
import redis
folder = pathlib.Path({folder!r})
role, option = sys.argv[3], dict(zip(sys.argv, sys.argv[1:]))
client = redis.Redis.from_url(option["--redis"])
asked = []
open(folder / role, "a").write(str(os.getpid()) + "\\n")
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))

def state(name):
    client.hset("polyreme:{{" + option["--run"] + "}}:meta", "state", name)

if role == "train":
    assert int(option["--owner"]) == os.getppid()
    state("running")
    while not asked and not (folder / "trained").exists():
        time.sleep(0.02)
    (folder / "saved").touch()
    state("done")
else:
    while not asked:
        time.sleep(0.02)
"""


@contextmanager
def up(config_file: Path, **environment: str) -> Iterator["subprocess.Popen[str]"]:
    """`polyreme up`, its output and errors in one pipe; killed when the block has not waited for its end."""
    child = config_file.parent / "child"
    child.write_text(CHILD.format(python=sys.executable, folder=str(config_file.parent)))
    child.chmod(0o755)
    script = (
        f"import sys\nsys.executable = {str(child)!r}\nsys.argv = ['polyreme', 'up', {str(config_file)!r}]\n"
        "from polyreme.cli.main import main\nmain()"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("POLYREME_")}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean | environment, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until(process: "subprocess.Popen[str]", word: str) -> None:
    """Reads until a line has `word`."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if word in line:
            return
    raise AssertionError("".join(said))


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_whose_reader_is_gone_goes_on_to_its_own_end(config_file: Path, live: bool, stopped: bool) -> None:
    with up(config_file, **({"FORCE_COLOR": "1"} if live else {})) as process:
        until(process, "running")
        assert process.stdout is not None
        process.stdout.close()
        if stopped:
            process.send_signal(signal.SIGINT)
        else:
            (config_file.parent / "trained").touch()
        assert process.wait(300) == 0
    assert (config_file.parent / "saved").exists()


def test_a_server_that_ends_while_its_run_goes_on_is_started_again(config_file: Path) -> None:
    started = config_file.parent / "reward"
    with up(config_file) as process:
        until(process, "running")
        os.kill(int(started.read_text()), signal.SIGTERM)
        wait_until(lambda: len(started.read_text().split()) == 2)
        (config_file.parent / "trained").touch()
        assert process.wait(300) == 0
