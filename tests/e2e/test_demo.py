"""The whole system, started like a user's run: it learns, exports a model that answers as its replica did, and leaves nothing else."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from polyreme.rundir.run_directory import read_run_file
from support.processes import command_line
from support.whole_run import RIGHT, Up, make_task

pytestmark = [pytest.mark.real, pytest.mark.timeout(2400)]

VLLM = "rollout.engine=vllm"
FOREIGN = {
    **{"VLLM_PORT": "tcp://10.0.0.7:8000", "VLLM_HOST_IP": "192.0.2.7", "GLOO_SOCKET_IFNAME": "nothing0"},
    **{"RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.7", "TORCHELASTIC_USE_AGENT_STORE": "True"},
}
"""What Kubernetes and a surrounding job may set."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"), engine="transformers")


def audit(run_dir: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "polyreme", "audit", str(run_dir)], capture_output=True, text=True, timeout=300)


def test_a_run_learns_and_leaves_what_it_promises(task: Path) -> None:
    (far := task.parent / "temporary files far below, beyond the room of a unix socket's address").mkdir()
    up = Up(task, "name=learns", VLLM, TMPDIR=str(far), **FOREIGN)
    up.until(lambda: len(up.records("iteration")) >= 1)
    assert_on_loopback_alone(up)
    assert up.wait() == 0, up.output
    assert not up.leftovers()

    rewards = [record["reward/mean"] for record in up.records("iteration")]
    assert len(rewards) == 8
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.3, rewards
    assert all(record["staleness/max"] == 0 for record in up.records("iteration"))
    assert all(record["mismatch_kl"] < 1e-4 for record in up.records("iteration"))

    summary = json.loads((up.run_dir / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.5 < summary["accuracy_after"], (rewards, up.records("eval"), up.records("commit"))
    assert summary["iterations"] == 8
    assert summary["sft_seconds"] > 0 < summary["rl_seconds"]
    assert len(list((up.run_dir / "samples").glob("iteration_*.jsonl"))) == 8
    samples = [json.loads(line) for line in (up.run_dir / "samples" / "iteration_0008.jsonl").read_text().splitlines()]
    assert len(samples) == 64
    assert all(sample["score"] == float(sample["response"] == RIGHT) for sample in samples)
    assert list((up.run_dir / "tensorboard").iterdir())
    assert "accuracy" in up.output.splitlines()[-1] or str(up.run_dir) in up.output

    assert audit(up.run_dir).returncode == 0
    assert_answers_as_the_replica_did(Path(summary["hf_path"]), up)


def assert_answers_as_the_replica_did(model_dir: Path, up: Up) -> None:
    """`transformers` loads the trained policy, and its greedy answers are those of the last evaluation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(model_dir), AutoModelForCausalLM.from_pretrained(model_dir)
    for example in up.records("eval")[-1]["examples"]:
        ids = torch.tensor([tokenizer(example["prompt"])["input_ids"]])
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4)[0, ids.shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=True) == example["response"]


def assert_on_loopback_alone(up: Up) -> None:
    """No process of the run listens on another address."""
    listening = {
        (connection.laddr.ip.removeprefix("::ffff:"), " ".join(command_line(process)))
        for process in psutil.Process(up.process.pid).children(recursive=True)
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert len(listening) >= 5, "Redis, trainer, reward, replica and the learner's ranks"
    assert {address for address, _ in listening} <= {"127.0.0.1", "::1"}, listening


def test_ctrl_c_drains_and_saves_and_resume_continues(task: Path) -> None:
    first = Up(task, "name=drains", "iterations=200")
    first.until(lambda: len(first.records("iteration")) >= 2)
    first.signal(signal.SIGINT)
    assert first.wait() == 0, first.output
    assert not first.leftovers()
    stood = max(record["iteration"] for record in first.records("iteration"))
    assert first.records("saved")[-1]["iteration"] == stood < 200

    refused = Up(task, "name=drains", f"iterations={stood + 2}")
    assert refused.wait() == 2
    assert "--resume" in refused.output and "--fork" in refused.output

    second = Up(task, "name=drains", f"iterations={stood + 2}", "--resume")
    assert second.wait() == 0, second.output
    assert [record["iteration"] for record in second.records("iteration")] == list(range(1, stood + 3))
    assert audit(second.run_dir).returncode == 0


@pytest.mark.parametrize("moment", ["services", "learner", "running"])
def test_nothing_outlives_a_killed_up(task: Path, moment: str) -> None:
    up = Up(task, f"name=killed-{moment}", "iterations=200", *([VLLM] if moment == "running" else []))
    if moment == "running":
        up.until(lambda: len(up.records("iteration")) >= 1)
    else:
        started = {"services": "train.log", "learner": "learner-0.log"}[moment]
        up.until(lambda: (up.run_dir / "logs" / "attempt_1" / started).exists())
    up.kill()
    up.ends_with_all()


def test_a_second_ctrl_c_ends_at_once(task: Path) -> None:
    up = Up(task, "name=twice", "iterations=200")
    up.until(lambda: (up.run_dir / "logs" / "attempt_1" / "learner-0.log").exists())
    up.signal(signal.SIGINT)
    time.sleep(0.5)
    up.signal(signal.SIGINT)
    assert up.wait() in (0, 128 + signal.SIGINT), up.output
    up.ends_with_all()


def test_a_run_that_cannot_continue_ends_with_the_reason(task: Path) -> None:
    (task.parent / "broken.py").write_text("import no_such_module\n\n\ndef reward(response, label):\n    return 1.0\n")
    up = Up(task, "name=fails", f"reward.rewards=[{{file: '{task.parent / 'broken.py'}'}}]")
    assert up.wait() not in (0, None)
    assert up.records("start") and not up.leftovers()
    assert "no_such_module" in up.output
    assert "reward.log" in up.output
    assert "Traceback" not in up.output
    assert up.output.count("No module named 'no_such_module'") == 1


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        (
            "hangs",
            ["reward.rewards=[{file: REWARDS, function: hangs}]", "reward.item_timeout=0.5", "reward.start_timeout=30"],
            "timeout: ",
        ),
        ("not-finite", ["reward.rewards=[{file: REWARDS, function: not_a_number}]"], "found nan"),
        ("alone", [VLLM, "rollout.start_timeout=2"], "rollout.start_timeout = 2 s"),
        ("template", ["model.path=MODEL"], "add_generation_prompt"),
    ],
)
def test_bad_input_is_one_message_and_the_end(task: Path, tmp_path: Path, name: str, changes: list[str], told: str) -> None:
    rewards, model = tmp_path / "rewards.py", tmp_path / "model"
    rewards.write_text(
        "import time\ndef hangs(response):\n    time.sleep(60)\ndef not_a_number(response):\n    return float('nan')\n"
    )
    shutil.copytree(task.parent / "model", model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text(template.replace("{%- if add_generation_prompt -%}={%- endif -%}", ""))
    resolved = [change.replace("REWARDS", str(rewards)).replace("MODEL", str(model)) for change in changes]
    up = Up(
        task,
        f"name={name}",
        "trainer.sft=[]",
        "max_attempts=1",
        "reward.attempts=1",
        "eval_samples=4",
        "group_size=2",
        "max_failed_fraction=0",
        *resolved,
    )
    assert up.wait() not in (0, None)
    errors = [line for line in up.output.splitlines() if line.startswith("polyreme: error: ")]
    assert len(errors) == 1, up.output
    assert told in errors[0]
    assert up.output.count(errors[0].removeprefix("polyreme: error: ")) == 1
    assert "Traceback" not in up.output
    assert not up.leftovers()


def test_a_killed_redis_restarts_and_a_fork_continues_from_the_last_checkpoint(task: Path) -> None:
    # All checkpoints are kept, and with them all groups, since the writer of the samples may be the last to reconnect to Redis.
    first = Up(task, "name=forked", "iterations=4", "trainer.keep_checkpoints=4", "trainer.save_interval=1")
    first.until(lambda: len(first.records("iteration")) >= 1)
    (redis,) = [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(first.run_dir / "redis")]
    redis.kill()
    assert first.wait() == 0, first.output
    assert "Redis ended; restart 1 of" in first.output
    assert audit(first.run_dir).returncode == 0
    assert len(list((first.run_dir / "samples").glob("iteration_*.jsonl"))) == 4
    parent = read_run_file(first.run_dir)
    before = {path: path.read_bytes() for path in first.run_dir.rglob("*") if path.is_file()}

    fork = Up(task, "name=forked", "iterations=6", "trainer.optimizer.lr=5e-4", "--fork")
    fork.run_dir = first.run_dir.with_name("forked-fork-1")
    assert fork.wait() == 0, fork.output
    assert not fork.leftovers()
    found = read_run_file(fork.run_dir)
    assert parent is not None and found is not None and found.forked_from is not None
    assert (found.forked_from.run_id, found.forked_from.iteration) == (parent.run_id, 4)
    assert [record["iteration"] for record in fork.records("iteration")] == [5, 6]
    assert not fork.records("sft_done"), "the fork was warmed up anew"
    samples = (fork.run_dir / "samples" / "iteration_0005.jsonl").read_text().splitlines()
    assert {json.loads(line)["group"] for line in samples} == set(range(32, 40))
    assert audit(fork.run_dir).returncode == 0
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.slow
def test_a_replica_whose_engine_is_killed_is_started_again(task: Path) -> None:
    """vLLM's core is a separate process. The replica survives it and must detect its end."""
    up = Up(task, "name=coreless", "iterations=6", VLLM)
    up.until(lambda: len(up.records("iteration")) >= 2)
    [service] = [process for process in psutil.Process(up.process.pid).children() if "rollout" in command_line(process)]
    [core] = service.children()
    core.kill()
    assert up.wait() == 0, up.output
    assert "rollout-0 ended with status 1; restart 1 of 3" in up.output
    assert len({record["replica"] for record in up.records("commit")}) == 2
    assert audit(up.run_dir).returncode == 0
    assert not up.leftovers()


@pytest.mark.slow
def test_the_demo_reaches_ninety_percent(tmp_path: Path) -> None:
    """The documented result of `make demo`, on the unchanged example."""
    example = Path(__file__).resolve().parents[2] / "examples" / "running_total"
    subprocess.run([sys.executable, str(example / "prepare.py")], check=True, timeout=600)
    command = [sys.executable, "-m", "polyreme", "up", str(example / "run.yaml"), f"output_dir={tmp_path}"]
    subprocess.run(command, check=True, timeout=2400, env={**os.environ, "COLUMNS": "120"})
    summary = json.loads((tmp_path / "running-total" / "summary.json").read_text())
    assert 0.15 <= summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= 0.9
