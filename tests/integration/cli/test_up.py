"""`polyreme up` with its own Redis. Small child processes replace the services and the trainer. `up` itself is forked from a process that
has imported it."""

import json
import os
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from polyreme.net.redis_url import PASSWORD
from polyreme.net.seal import SEAL
from polyreme.rundir.run_directory import read_run_file
from polyreme.rundir.run_records import read_summary
from support.commands import Fork, fork, piped, polyreme
from support.processes import command_line, runs
from support.waiting import wait_until

CHILD = """#!{python}
import os, pathlib, signal, sys, time
if sys.argv[1] != "-m":  # no service: a program of its own, such as the trial of a chat template
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
folder = pathlib.Path({folder!r})
role, option = sys.argv[3], dict(zip(sys.argv, sys.argv[1:]))
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
with open(folder / role, "a") as starts:
    starts.write(str(os.getpid()) + "\\n")

def state(name):
    with redis.Redis.from_url(option["--redis"], password=os.environ["POLYREME_REDIS_PASSWORD"]) as client:
        client.hset("polyreme:{{" + option["--run"] + "}}:meta", "state", name)

if role == "train":
    import redis
    state("running")
    (folder / "running").write_text(option["--run"])
    (folder / "runs" / "run" / "checkpoints" / "iteration-000000").mkdir(parents=True, exist_ok=True)
    while not asked and not (folder / "trained").exists():
        if (folder / "broken").exists():
            os._exit(1)
        time.sleep(0.02)
    (folder / "saved").touch()
    state("stopped" if asked else "done")
    while (folder / "waits").exists() and not (folder / "reward-ended").exists():
        time.sleep(0.02)
else:
    while not asked:
        time.sleep(0.02)
    (folder / (role + "-ended")).touch()
"""


@contextmanager
def up(config_file: Path, *options: str, terminal: int | None = None, **environment: str) -> Iterator[Fork]:
    """Runs `polyreme up` with its outputs in one pipe, or in its own terminal. Kills it at the end of the block."""
    child = config_file.parent / "child"
    child.write_text(CHILD.format(python=sys.executable, folder=str(config_file.parent)))
    child.chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("POLYREME_")} | environment
    argv = ["up", str(config_file), *options]
    if terminal is None:
        with piped("polyreme", argv, clean, executable=str(child)) as process:
            yield process
    else:
        process = fork("polyreme", argv, clean, (terminal, terminal), executable=str(child), terminal=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def until(process: Fork, word: str) -> None:
    """Reads until a line contains `word`."""
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if word in line:
            return
    raise AssertionError("".join(said))


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_continues_after_its_reader_has_gone(config_file: Path, live: bool, stopped: bool) -> None:
    with up(config_file, FORCE_COLOR="1" if live else "") as process:
        until(process, "running")
        assert process.stdout is not None
        process.stdout.close()
        if stopped:
            process.send_signal(signal.SIGINT)
        else:
            (config_file.parent / "trained").touch()
        assert process.wait(300) == 0
    assert (config_file.parent / "saved").exists()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_servers_end_while_the_trainer_does(config_file: Path, stopped: bool) -> None:
    """The trainer's last records need no server. This trainer waits for the end of one."""
    (config_file.parent / "waits").touch()
    with up(config_file) as process:
        until(process, "running")
        if stopped:
            process.send_signal(signal.SIGINT)
        else:
            (config_file.parent / "trained").touch()
        assert process.wait(300) == 0


def test_a_server_that_ends_during_the_run_is_restarted(config_file: Path) -> None:
    started = config_file.parent / "reward"

    def pids() -> list[int]:
        """The pids of the started reward servers. A line without its end is still being written."""
        lines = started.read_text().splitlines(keepends=True) if started.exists() else []
        return [int(line) for line in lines if line.endswith("\n")]

    with up(config_file) as process:
        until(process, "running")
        wait_until(lambda: len(pids()) == 1)
        os.kill(pids()[0], signal.SIGTERM)
        wait_until(lambda: len(pids()) == 2)
        (config_file.parent / "trained").touch()
        assert process.wait(300) == 0


@pytest.fixture
def run_dir(config_file: Path) -> Path:
    return config_file.parent / "runs" / "run"


def test_a_terminal_that_is_closed_drains_the_run(config_file: Path, run_dir: Path) -> None:
    leader, follower = os.openpty()
    with up(config_file, terminal=follower, TERM="xterm") as process:
        os.close(follower)
        wait_until((config_file.parent / "running").exists)
        os.close(leader)  # the kernel sends SIGHUP
        assert process.wait(300) == 0
    assert (config_file.parent / "saved").exists()
    assert read_summary(run_dir)["state"] == "stopped"


def test_a_detached_run_continues_and_its_command_returns(config_file: Path, run_dir: Path) -> None:
    with up(config_file, "--detach") as process:
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait(300) == 0, said
    pid = int(said.partition("`kill ")[2].partition("`")[0])
    wait_until((config_file.parent / "running").exists)
    found = read_run_file(run_dir)
    assert found is not None and found.run_id in said
    assert runs(pid)
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not runs(pid))
    assert (config_file.parent / "saved").exists()
    assert found.run_id in (run_dir / "up.log").read_text()


def test_a_detached_run_that_cannot_start_prints_the_error(config_file: Path) -> None:
    with up(config_file, "--detach", "--redis", "redis://127.0.0.1:1") as process:
        assert process.stdout is not None
        assert "polyreme: error: " in process.stdout.read()
        assert process.wait(300) == 3


def test_a_resumed_run_keeps_its_port_and_a_finished_run_starts_nothing(config_file: Path, run_dir: Path) -> None:
    ports = []
    for options in ((), ("--resume",)):
        with up(config_file, *options) as process:
            until(process, "running")
            found = read_run_file(run_dir)
            assert found is not None
            ports.append(found.redis_url)
            if options:
                (config_file.parent / "trained").touch()
                assert process.stdout is not None
                assert "reinforcement learning 6.0 s" in process.stdout.read(), "the earlier records are only on disk"
            else:
                write_past(run_dir, found.run_id)
                process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0
    assert ports[0] == ports[1]
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with up(config_file, "--resume") as process:
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait(300) == 0
    assert "is done after 1000 iterations" in said.replace("\n", " ")
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def write_past(run_dir: Path, run_id: str) -> None:
    """Records three iterations that Redis does not have."""
    lines = [
        {"run": run_id, "id": f"{n}-0", "kind": "iteration", "iteration": n, "time": 2.0 * n, "time/iteration": 2.0}
        for n in (1, 2, 3)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_running_run_can_be_audited_by_its_directory(config_file: Path, run_dir: Path) -> None:
    with up(config_file) as process:
        until(process, "running")
        result = polyreme("audit", str(run_dir))
        assert result.returncode == 0, result.stderr
        found = read_run_file(run_dir)
        assert found is not None and found.run_id in result.stdout
        (config_file.parent / "trained").touch()
        assert process.wait(300) == 0


def test_only_its_user_can_read_what_commands_a_run(config_file: Path, run_dir: Path) -> None:
    """The password of its Redis: others find it in no argument and in no file that they may read."""
    with up(config_file) as process:
        until(process, "running")
        secret = (run_dir / "redis" / "password").read_text()
        children = psutil.Process(process.pid).children(recursive=True)
        arguments = [word for child in children for word in command_line(child)]
        environments = [child.environ() for child in children if "train" in command_line(child)]
        (config_file.parent / "trained").touch()
        assert process.stdout is not None
        said = process.stdout.read()
        assert process.wait(300) == 0
    found = read_run_file(run_dir)
    assert found is not None and found.redis_url in arguments
    assert secret not in said and not [word for word in arguments if secret in word]
    assert [(each[PASSWORD], each[SEAL].split()[0]) for each in environments] == [(secret, found.run_id)]
    assert stat.S_IMODE((run_dir / "redis").stat().st_mode) == 0o700
    for path in run_dir.rglob("*"):
        inside = (run_dir / "redis") in path.parents
        assert inside or not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_the_end_is_recorded_when_the_trainer_cannot_record_it(config_file: Path, run_dir: Path) -> None:
    with up(config_file, "trainer.max_restarts=1") as process:
        until(process, "running")
        (config_file.parent / "broken").touch()
        until(process, "train restarts: ")
        assert process.wait(300) not in (0, None)
    summary = read_summary(run_dir)
    assert summary["state"] == "failed"
    assert "train ended with status 1" in summary["reason"]
