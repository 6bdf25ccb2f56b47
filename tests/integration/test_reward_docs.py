"""Writes the files of the guide to rewards and runs its commands."""

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from polyreme_reward.rules import BUILTINS
from support import guide
from support.certificates import issue
from support.commands import search_path
from support.models import tiny_reward_model

GUIDE = guide.ROOT / "docs" / "rewards.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The guide's files, with a free port instead of the documented one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    for block in guide.blocks(GUIDE):
        if block.file:
            (tmp_path / block.file).write_text(block.text.replace("8731", port))
    (tmp_path / "port").write_text(port)
    return tmp_path


def commands() -> list[str]:
    return guide.commands("rewards.md")


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a snippet to its end, and ends all its remaining processes."""
    environment = {**os.environ, "PATH": search_path(), "NO_PROXY": "127.0.0.1"}
    script = f"trap 'kill $(jobs -p) || true' EXIT\n{script}".replace("8731", (folder / "port").read_text())
    return subprocess.run(["bash", "-ec", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_the_python_reward(folder: Path) -> None:
    done = run(commands()[0], folder)
    assert done.returncode == 0, done.stderr
    assert re.search(r"1 +OK +score 1 +my_reward 1 .*\n +response It is Paris\.\n +label +Paris\n", done.stdout)
    assert "mean 0.375 of 2, 0 without a score" in done.stdout


def test_the_reward_of_every_token(folder: Path) -> None:
    done = run(commands()[1], folder)
    assert done.returncode == 0, done.stderr
    assert "mean 0.5 of 1, 0 without a score" in done.stdout


@pytest.mark.skipif(shutil.which("node") is None, reason="the guide's server is written for node")
def test_the_server_in_another_language(folder: Path) -> None:
    done = run(commands()[2], folder)
    assert done.returncode == 0, done.stderr
    assert "mean 0.5 of 2, 0 without a score" in done.stdout


def test_the_reward_model(folder: Path) -> None:
    tiny_reward_model(folder / "reward-model")
    done = run(commands()[3], folder)
    assert done.returncode == 0, done.stderr
    assert "preference" in done.stdout and "of 2, 0 without a score" in done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="the guide asks with curl whether the service is ready")
def test_a_secured_service_and_its_caller(folder: Path) -> None:
    issued = issue(folder / "tls")
    for side in ("server", "client"):
        shutil.copy(issued.certificate, folder / "tls" / f"{side}.pem")
        shutil.copy(issued.key, folder / "tls" / f"{side}.key")
    done = run(commands()[4], folder)
    assert done.returncode == 0, done.stderr
    assert '{"ready":true}' in done.stdout
    assert "mean 0.5 of 2, 0 without a score" in done.stdout
    (folder / "far.yaml").write_text((folder / "far.yaml").read_text().replace("token_env: REWARD_TOKEN", "#"))
    refused = run(commands()[4], folder)
    assert refused.returncode == 1
    assert "2 without a score" in refused.stdout and "401" in refused.stdout


def test_a_failure_shows_and_ends_with_an_error(folder: Path) -> None:
    (folder / "samples.jsonl").write_text('{"response": "3", "label": "3"}\n\n{"response": "3"}\n')
    (folder / "rewards.yaml").write_text("reward: {rewards: [{name: exact}]}\n")
    done = run(commands()[0], folder)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "ERROR" in done.stdout
    assert "mean 1 of 1, 1 without a score" in done.stdout


@pytest.mark.parametrize(
    ("lines", "said"),
    [("", "none"), ("{", "samples.jsonl:1"), ('{"prompt": "p"}', "`response`"), ('{"response": 3}', "text under response")],
)
def test_a_file_that_cannot_be_read_is_one_clear_error(folder: Path, lines: str, said: str) -> None:
    (folder / "samples.jsonl").write_text(lines)
    done = run(commands()[0], folder)
    assert (done.returncode, "Traceback" in done.stderr, said in done.stderr) == (2, False, True), done.stderr


def test_the_table_names_every_builtin() -> None:
    table = GUIDE.read_text().partition("## Built in")[2].partition("##")[0]
    assert set(re.findall(r"^\| `(\w+)` \| .* \|$", table, re.MULTILINE)) - {"name"} == set(BUILTINS)
