"""Whole runs with the real learner on episodes of several turns: what each way to learn sees of them, and a run that is killed and resumed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.whole_run import Up, make_game

pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]

TALK = '''
class Talk:
    """Counts the words of each answer, and ends after three, or after a digit."""
    def reset(self, row, seed):
        self.said = 0
    def step(self, message):
        self.said += 1
        return "number", len(message) / 10, self.said == 3 or message[-1:] in "13579"
'''
REWRITES = '''
import json, urllib.request

def run(task, base_url, api_key):
    """Says something twice after the same turn, and then without its history."""
    def chat(messages):
        body = json.dumps({"model": "policy", "messages": messages}).encode()
        headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
        reply = urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers), timeout=300)
        return [*messages, json.load(reply)["choices"][0]["message"]]
    first = chat([{"role": "user", "content": "guess"}])
    more = [chat([*first, {"role": "user", "content": each}]) for each in ("higher", "lower")]
    last = chat([{"role": "user", "content": "number"}])
    return sum(len(each[-1]["content"]) for each in (*more, last)) / 10
'''
SMALL = {"iterations": 3, "groups_per_iteration": 2, "group_size": 4, "output_dir": "runs"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's folder with its data; its model keeps its random weights."""
    folder = make_game(tmp_path_factory.mktemp("made")).parent
    (folder / "talk.py").write_text(TALK)
    (folder / "rewrites.py").write_text(REWRITES)
    return folder


def written(made: Path, name: str, **sections: Any) -> Path:
    tree = yaml.safe_load((made / "run.yaml").read_text()) | SMALL | {"name": name}
    tree["environment"] = {"file": "talk.py", "max_turns": 3}
    tree["trainer"] = {"optimizer": {"lr": 1e-3}, "save_interval": 1}
    tree["rollout"] |= {"engine": "transformers"}
    for key, value in sections.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) and key != "algorithm" else value
    path = made / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def finished(up: Up, iterations: int = 3) -> list[dict[str, Any]]:
    """The iterations of a run that has ended well: what the learner computes is what the replica sampled."""
    assert up.wait() == 0, up.output
    assert not up.leftovers()
    audit = [sys.executable, "-m", "polyreme", "audit", str(up.run_dir)]
    assert subprocess.run(audit, capture_output=True, timeout=300).returncode == 0
    records = {record["iteration"]: record for record in up.records("iteration")}
    assert sorted(records) == list(range(1, iterations + 1))
    for record in records.values():
        assert record["episode/turns/mean"] > 1 and record["grad_norm"] > 0
        assert record["mismatch_kl"] is None or record["mismatch_kl"] < 1e-4
    return [records[number] for number in sorted(records)]


def samples(up: Up, iterations: int = 3) -> list[dict[str, Any]]:
    paths = [up.run_dir / "samples" / f"iteration_{number:04d}.jsonl" for number in range(1, iterations + 1)]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


PPO = {"algorithm": {"preset": "ppo"}, "environment": {"file": "talk.py", "max_turns": 3}}


def test_ppo_takes_rewards_of_turns_and_resumes_a_killed_run(made: Path) -> None:
    """The whole run is killed after its first iteration. The resumed one samples the same tokens as one that nothing happened to."""
    whole = Up(written(made, "whole", **PPO), "name=whole")
    expected = finished(whole)
    assert all(record["critic/vf_loss"] >= 0 for record in expected)
    assert any(sum(turn["reward"] != 0 for turn in sample["turns"]) > 1 for sample in samples(whole))

    path = written(made, "killed", **PPO)
    killed = Up(path, "name=killed")
    killed.until(lambda: len(killed.records("iteration")) >= 1)
    killed.kill()
    killed.ends_with_all()
    resumed = Up(path, "name=killed", "--resume")
    found = finished(resumed)
    for one, other in zip(samples(whole), samples(resumed), strict=True):
        assert (one["token_ids"], one["turns"][0]["end"], one["score"]) == (
            other["token_ids"],
            other["turns"][0]["end"],
            other["score"],
        )
    for one, other in zip(expected, found, strict=True):
        assert one["critic/vf_loss"] == pytest.approx(other["critic/vf_loss"], rel=1e-3)


AGENT = {"file": "rewrites.py", "function": "run", "max_turns": 4}


def test_grpo_with_branches_on_shared_devices(made: Path) -> None:
    sections = {"placement": "colocated", "environment": AGENT, "algorithm": {"preset": "grpo", "kl": None}}
    up = Up(written(made, "branches", **sections), "name=branches")
    for record in finished(up):
        assert record["episode/branches"] == 2.0 and record["episode/turns/mean"] == 4.0 and record["staleness/max"] == 0
    for sample in samples(up):
        assert len(sample["trajectories"]) == 3


OTHERS = {
    "dapo": {"algorithm": {"preset": "dapo"}},
    "turn-norm": {"algorithm": {"preset": "grpo", "kl": None, "advantage": {"kind": "turn_norm", "gamma": 0.4}}},
    "asynchronous": {"algorithm": {"preset": "grpo", "kl": None}, "max_staleness": 2, "rollout": {"tokens_per_iteration": 6}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_to_learn_from_turns(made: Path, name: str) -> None:
    up = Up(written(made, name, **OTHERS[name]), f"name={name}", "iterations=6")
    records = finished(up, 6)
    assert all(record["staleness/max"] <= (2 if name == "asynchronous" else 0) for record in records)
    if name == "asynchronous":
        assert sum(record["rollout/paused_samples"] for record in up.records("rollout")) > 0
