"""Executes every block of docs/tutorial.md and docs/v1.md, in order."""

import json
import re
import shutil
from pathlib import Path

import pytest

from polyreme.rundir.run_directory import read_run_file
from support import guide
from support.whole_run import Up

PAGE = "tutorial.md"
MAKE, REWARD, CHECK, UP, AUDIT, ANSWER, AGENT = guide.commands(PAGE)


def documented(name: str) -> bool:
    """Whether docs/reference/ has a name among a record's fields or the metrics. Words in capitals are placeholders."""
    pages = Path(__file__).resolve().parents[2] / "docs" / "reference"
    names = re.findall(r"`([\w/]+)`", "".join((pages / f"{page}.md").read_text() for page in ("records", "metrics")))
    return any(re.fullmatch(re.sub(r"[A-Z]{3,}", r"\\S+", found), name) for found in names)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The guide's files, and the results of its first command."""
    folder = tmp_path_factory.mktemp("made")
    guide.write_files(PAGE, folder)
    guide.write_files("v1.md", folder)
    guide.run(MAKE, folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "own")


def test_the_way_to_a_run_that_can_start(folder: Path) -> None:
    reward = guide.run(REWARD, folder, forks=True)
    assert "mean 0.375 of 2, 0 without a score" in reward
    assert "checks         passed" in guide.run(CHECK, folder, forks=True)


def test_a_mistake_on_the_way_is_found_before_the_run(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"question": "vowels for tom", "answer": "aeiouy"}\n')
    with pytest.raises(AssertionError, match=r"train\.jsonl:1"):
        guide.run(CHECK, folder, forks=True)


@pytest.mark.real
def test_the_run_and_the_agent_learn_and_leave_models(folder: Path) -> None:
    [ask] = guide.commands(PAGE, info="")[1:]
    assert [ask] == guide.commands("v1.md", info="")
    assert UP.split() == ["polyreme", "up", "run.yaml"]
    up = Up(folder / "run.yaml", "name=letters")
    up.until(lambda: (found := read_run_file(up.run_dir)) is not None and bool(found.replicas) and bool(up.records("iteration")))
    asked = guide.run(ask, folder)
    assert asked.startswith("letters "), asked
    assert up.wait() == 0, up.output
    undocumented = {name for record in up.records("iteration") for name in record if not documented(name)}
    assert not undocumented
    rewards = [record["reward/mean"] for record in up.records("iteration")]
    assert len(rewards) == 60
    assert sum(rewards[-5:]) / 5 > rewards[0] + 0.2, rewards
    assert json.loads((up.run_dir / "summary.json").read_text())["state"] == "done"
    guide.run(AUDIT, folder)
    answer = guide.run(ANSWER, folder).splitlines()[-1]
    assert 0 < len(answer) <= 8 and set(answer) <= set("abcdefghijklmnopqrstuvwxyz ="), answer
    start, samples = AGENT.splitlines()
    assert start.split() == ["polyreme", "up", "agent.yaml"]
    agent = Up(folder / "agent.yaml", "iterations=20", "name=agent")
    assert agent.wait() == 0, agent.output
    rewards = [record["reward/mean"] for record in agent.records("iteration")]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.08, rewards
    assert "environment/tries" in guide.run(samples, folder)
