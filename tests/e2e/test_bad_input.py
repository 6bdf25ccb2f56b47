"""Bad input: real commands as processes end with one message with a fix and an exit status, and leave nothing behind.

tests/unit/rundir/test_checks.py tests each check before a start, and test_demo.py rewards that hang or are not finite.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from polyreme.experience.embedded_redis import EmbeddedServer, redis_binary
from polyreme.net.ports import free_port
from support import commands
from support.processes import command_line, runs
from support.whole_run import Up, make_task

pytestmark = pytest.mark.timeout(1800)

COMMAND = (sys.executable, "-m", "polyreme")
OTHER_API = (sys.executable, "-c", "import polyreme; polyreme.API_VERSION += 1\nfrom polyreme.cli.main import main\nmain()")
"""Runs the command as another release of Polyreme."""
REWARDS = """
calls = 0
def raises(response):
    global calls
    calls += 1
    if calls % 2:  # not always: that ends the run at its first groups
        raise KeyError("no such label")
    return 0.0

def always(response):
    raise KeyError(f"no such label: {response}")
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task in a folder with an unusual name."""
    folder = tmp_path_factory.mktemp("task") / "Aufgabe für zwei [b]"
    folder.mkdir()
    (folder / "rewards.py").write_text(REWARDS)
    return make_task(folder, engine="transformers")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that is in use."""
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        yield owner.getsockname()[1]


def start(*argv: str, command: tuple[str, ...] = COMMAND, cwd: Path | None = None) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POLYREME_")}
    return subprocess.Popen(
        [*command, *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env={**environment, "COLUMNS": "200"},
        start_new_session=True,
    )


def told(process: "subprocess.Popen[str]", code: int, *pieces: str, seconds: float = 300.0) -> str:
    """The output of a command that ended with `code` and one error that contains these pieces."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"not done within {seconds} s: {process.communicate()[0]}") from None
    assert process.returncode == code, output
    one_error(output, *pieces)
    return output


def one_error(output: str, *pieces: str) -> str:
    """Returns the only error in a command's output, which has no traceback. It may list several errors of the checks."""
    assert "Traceback" not in output, output
    errors = [line for line in output.splitlines() if line.startswith("polyreme: error: ")]
    assert len(errors) == 1, output
    for piece in pieces:
        assert piece in output[output.index(errors[0]) :]
    return errors[0]


def test_what_a_command_refuses_at_once(task: Path, tmp_path: Path, taken: int) -> None:
    alone = tmp_path / "reward.yaml"
    alone.write_text("reward: {rewards: [{name: exact}]}")
    misspelt = tmp_path / "misspelt.yaml"
    misspelt.write_text("reward: {rewards: [{name: exact}], atempts: 3}")
    cut = shutil.copytree(task.parent / "model", tmp_path / "cut")
    os.truncate(cut / "model.safetensors", 100_000)
    run, nobody = str(task), "redis://127.0.0.1:1"
    free = "Choose another port or host"
    cases = [
        (("up", run, "trainer.optimizer.lr.x=1"), 2, ["trainer.optimizer.lr.x", "0.001"]),
        (("up", run, "reward.rewards.7.name=exact"), 2, ["reward.rewards.7.name"]),
        (("up", str(task.parent)), 2, ["Is a directory", "a configuration file"]),
        (("up", str(task.parent / "model" / "model.safetensors")), 2, ["expected YAML in"]),
        (("up", run, f"output_dir={run}"), 2, ["a writable run directory", "Set output_dir."]),
        (("train", run, "trainer.optimiser.lr=1"), 2, ["trainer.optimiser", "did you mean trainer.optimizer?"]),
        (("up", run, f"model.path={cut}"), 2, ["complete weights in", "Download or save the file again"]),
        (("train", run, "model.path=nowhere"), 2, ["model.path", "nowhere", "no such directory"]),
        (
            ("up", run, "data.max_prompt_tokens=4", "data.overlong=error"),
            2,
            ["= 4 tokens in", "train.jsonl:", "overlong: filter"],
        ),
        (("up", run, "data.label_key=solution"), 2, ["a column solution", "0 of 256 rows"]),
        (("train", run, "data.prompt_key=question"), 2, ["a column 'question'", "train.jsonl:1"]),
        (("up", run, "reward.rewards=[{file: nowhere.py}]"), 2, ["nowhere.py"]),
        (("train", run, f"output_dir={tmp_path}", "--http-port", str(taken)), 2, [f"a free port {taken} on 127.0.0.1"]),
        (("train", run, f"output_dir={tmp_path}", "--learner-port", str(taken)), 2, [f"a free port {taken}"]),
        (("reward", "--config", str(misspelt)), 2, ["reward.atempts", "did you mean reward.attempts?"]),
        (("reward", "--config", str(alone), "--port", str(taken)), 2, [f"a free port {taken} on 127.0.0.1 for gRPC", free]),
        (("reward", "--config", str(alone), "--http-port", str(taken)), 2, [f"a free port {taken}", "for HTTP", free]),
        (("rollout", "--redis", nobody, "--port", str(taken)), 2, [f"a free port {taken} on 127.0.0.1", free]),
        (("rollout", "--redis", nobody, "--http-port", str(taken)), 2, [f"a free port {taken} on 127.0.0.1", free]),
    ]
    for argv, code, pieces in cases:
        result = commands.start(*argv, together=True, COLUMNS="200").wait()
        assert result.returncode == code, result.stdout
        one_error(result.stdout, *pieces)


def test_a_redis_that_cannot_be_used(task: Path, tmp_path: Path) -> None:
    def run(*argv: str) -> commands.Started:
        return commands.start(*argv, together=True, COLUMNS="200")

    def refused(started: commands.Started, *pieces: str) -> str:
        ended = started.wait()
        assert ended.returncode == 3, ended.stdout
        one_error(ended.stdout, *pieces)
        return ended.stdout

    nobody = run("rollout", "--redis", "redis://127.0.0.1:1")
    port = free_port()
    keeps = ("--appendonly", "yes", "--appendfsync", "always", "--save", "", "--dir", str(tmp_path))
    redis = subprocess.Popen(
        [redis_binary(), "--port", str(port), *keeps, "--maxmemory-policy", "allkeys-lru"], stdout=subprocess.DEVNULL
    )
    try:
        evicts = [run(*argv, "--redis", f"redis://127.0.0.1:{port}") for argv in (("train", str(task)), ("reward",))]
        for started in evicts:
            refused(started, "maxmemory-policy allkeys-lru (must be noeviction)", "`config set maxmemory-policy noeviction`")
    finally:
        redis.terminate()
        redis.wait(300)
    output = refused(nobody, "connection refused (nothing listens there)", "redis-server --appendonly yes")
    assert output.count("connection refused") == 2  # once when it starts to wait, once at the end


@pytest.mark.real
def test_servers_of_another_version_are_named(task: Path, tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path / "redis") as server:
        reward = start("reward", "--redis", server.url, command=OTHER_API)
        try:
            overrides = ("name=skew", f"output_dir={tmp_path}", "data.max_prompt_tokens=4", "reward.start_timeout=20")
            train = start("train", str(task), *overrides, "--redis", server.url)
            told(train, 7, "reward.start_timeout = 20 s", "(API 2, ours is 1). Install the same Polyreme version everywhere.")
        finally:
            reward.send_signal(signal.SIGTERM)
            reward.communicate(timeout=300)
    records = (tmp_path / "skew" / "metrics.jsonl").read_text()
    assert "filtered as too long" in records
    assert "is ignored: expected API 1, found 2. Install the same Polyreme version everywhere." in records


@pytest.mark.real
def test_a_reward_that_raises_ends_the_run_with_its_words(task: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command runs from another folder, without a home directory, and with prompts beyond the context."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    rewards = os.path.relpath(task.parent / "rewards.py")
    changes = [f"reward.rewards=[{{file: '{rewards}', function: raises}}]"]
    changes += ["trainer.sft=[]", "max_attempts=1", "reward.attempts=1", "eval_samples=4"]
    up = Up(task, "name=raises", "max_failed_fraction=0", "data.max_prompt_tokens=4", *changes)
    assert up.wait() == 7
    one_error(up.output, "KeyError: 'no such label' (rewards.py:7)", "Fix the cause, then continue with --resume.")
    assert "filtered as too long" in up.output
    assert not up.leftovers()


@pytest.mark.real
def test_a_reward_that_never_scores_ends_the_run_at_its_first_groups(task: Path) -> None:
    """The run ends before the time for an outage is over, although no group has used all its attempts."""
    rewards = f"reward.rewards=[{{file: '{task.parent / 'rewards.py'}', function: always}}]"
    changes = ("trainer.sft=[]", "reward.attempts=1", "reward.start_timeout=1000", "max_failed_fraction=1", "data.eval=null")
    up = Up(task, "name=never", rewards, *changes)
    assert up.wait(600) == 7
    one_error(up.output, "scores for the first groups of the run", "KeyError", "rewards.py")
    assert not up.leftovers()


@pytest.mark.real
def test_a_redis_that_dies_again_and_again_ends_the_run(task: Path) -> None:
    up = Up(task, "name=dying", "trainer.max_restarts=1")
    second = None
    for count in (1, 2):
        up.until(lambda: bool(stores(up)))
        if count == 1:
            second = start("up", str(task), "name=dying")
            told(second, 2, "another process", "choose another name=")
        stores(up)[0].kill()
        if count == 1:
            up.until(lambda: (up.run_dir / "redis" / "redis.log").read_text().count("Ready to accept connections") == 2)
            assert "Redis ended; restart 1 of 1" in up.output
            time.sleep(5.0)  # `up` has now checked that it answers
    assert up.wait() == 3
    one_error(up.output, "the embedded Redis to keep running; found it ended 2 times", "redis.log", "--resume")
    assert not up.leftovers()


def stores(up: Up) -> list[psutil.Process]:
    """The run's own Redis."""
    return [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(up.run_dir / "redis") and runs(p)]


def loads(up: Up) -> bool:
    """Whether the trainer's process already turns SIGTERM into an interrupt. It opens the run much later."""
    for child in psutil.Process(up.process.pid).children():
        if "train" in command_line(child):
            caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{child.pid}/status").read_text(), re.MULTILINE)
            return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


@pytest.mark.real
@pytest.mark.parametrize("moment", ["before the store", "before the trainer listens", "while the trainer loads"])
def test_ctrl_c_before_there_is_anything_to_save(task: Path, moment: str) -> None:
    name = moment.replace(" ", "-")
    up = Up(task, f"name={name}")
    seen: dict[str, Callable[[], bool]] = {
        "before the store": lambda: "iterations" in up.output,
        "before the trainer listens": lambda: "starting" in up.output,
        "while the trainer loads": lambda: loads(up),
    }
    up.until(seen[moment])
    up.signal(signal.SIGINT)
    assert up.wait() in (0, 128 + signal.SIGINT), up.output  # 0: the trainer's handlers were installed already
    assert "Traceback" not in up.output and "error" not in up.output
    if (up.run_dir / "run.json").exists():
        assert not up.leftovers()
