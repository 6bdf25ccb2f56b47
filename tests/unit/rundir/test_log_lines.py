"""Log lines of several processes are merged into one stream."""

import threading
import tracemalloc
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyreme.cli.main import build_app
from polyreme.errors import ConfigError
from polyreme.rundir.log_lines import LogFile, in_order, log_files, newest_attempt
from polyreme.rundir.run_directory import owned


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for attempt in ("attempt_2", "attempt_10"):
        (tmp_path / "logs" / attempt).mkdir(parents=True)
    folder = tmp_path / "logs" / "attempt_10"
    (folder / "rollout-0.log").write_text("2026-01-01T00:00:02Z INFO second\n  its trace\n2026-01-01T00:00:05Z INFO last\n")
    (folder / "reward.log").write_text("2026-01-01T00:00:01Z INFO first\n2026-01-01T00:00:03Z INFO third\n")
    return tmp_path


def test_lines_are_in_order_of_time_and_a_trace_stays_with_its_line(run_dir: Path) -> None:
    files = log_files(newest_attempt(run_dir))
    texts = [line.text.split()[-1] for line in in_order(files)]
    assert texts == ["first", "second", "trace", "third", "last"]


def test_a_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes("one\nhalf é".encode()[:-1])
    file = LogFile(path)
    assert [line.text for line in file.read()] == ["one"]
    assert list(file.read()) == []
    with open(path, "ab") as log:
        log.write("é".encode()[-1:] + b"\n")
    assert [line.text for line in file.read()] == ["half é"]


def test_a_service_stands_for_its_processes(run_dir: Path) -> None:
    attempt = newest_attempt(run_dir)
    assert [file.process for file in log_files(attempt, "rollout")] == ["rollout-0"]
    with pytest.raises(ConfigError) as error:
        log_files(attempt, "roll")
    assert error.value.found == "reward, rollout-0"
    with pytest.raises(ConfigError):
        newest_attempt(attempt)


def test_the_command_prints_the_tail(run_dir: Path) -> None:
    result = CliRunner().invoke(build_app(["logs"]), ["logs", str(run_dir), "--tail", "2"])
    assert result.stdout.splitlines() == [
        "reward    | 2026-01-01T00:00:03Z INFO third",
        "rollout-0 | 2026-01-01T00:00:05Z INFO last",
    ]
    none = CliRunner().invoke(build_app(["logs"]), ["logs", str(run_dir), "--tail", "0"])
    assert none.stdout == ""


def test_following_ends_with_the_run(run_dir: Path) -> None:
    log = run_dir / "logs" / "attempt_10" / "train.log"
    looked = threading.Event()

    def end_of_run() -> None:
        with owned(run_dir):
            owns.set()
            looked.wait(60)
            log.write_text("2026-01-01T00:00:09Z INFO new process\n")

    owns = threading.Event()
    process = threading.Thread(target=end_of_run)
    process.start()
    assert owns.wait(60)
    threading.Timer(0.2, looked.set).start()
    result = CliRunner().invoke(build_app(["logs"]), ["logs", str(run_dir), "--follow", "--tail", "1"])
    process.join(60)
    assert [line.split()[-1] for line in result.stdout.splitlines()] == ["last", "process"]


def test_a_clock_that_is_set_back_keeps_the_order_of_a_file(run_dir: Path) -> None:
    path = run_dir / "logs" / "attempt_10" / "reward.log"
    path.write_text("2026-01-01T00:00:09Z first\n2026-01-01T00:00:01Z second\n")
    assert [line.text.split()[-1] for line in in_order([LogFile(path)])] == ["first", "second"]


def test_the_end_of_a_large_log_takes_little_memory(run_dir: Path) -> None:
    path = run_dir / "logs" / "attempt_10" / "reward.log"
    path.write_text("2026-01-01T00:00:09Z a line of a log that is long\n" * 100_000)
    tracemalloc.start()
    result = CliRunner().invoke(build_app(["logs"]), ["logs", str(run_dir), "reward", "--tail", "1"])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert result.stdout.endswith("that is long\n") and most < 2**20
