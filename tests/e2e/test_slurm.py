"""deploy/slurm on a real Slurm: a controller and two node daemons of this machine train the demo's first iterations."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = """
ClusterName=polyreme
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MailProg=/bin/true
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 Port={one} CPUs=1 RealMemory=1000
NodeName=two NodeHostname={host} NodeAddr=127.0.0.1 Port={two} CPUs=1 RealMemory=1000
PartitionName=all Nodes=one,two Default=YES State=UP OverSubscribe=NO
"""
TOOLS = ("slurmctld", "slurmd", "sbatch", "munged")
EXAMPLE = ROOT / "examples" / "running_total"


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of commands of a Slurm with two nodes."""
    key, configuration = tmp_path / "munge.key", tmp_path / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    tmp_path.chmod(0o755)
    controller, one, two = free_ports(3)
    configuration.write_text(
        CONFIGURATION.format(host=socket.gethostname().split(".")[0], controller=controller, folder=tmp_path, one=one, two=two)
    )
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_CONF": str(configuration),
        "HOME": str(tmp_path),
    }
    munge = [
        f"--{name}={tmp_path / 'munge'}.{ending}"
        for name, ending in (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"))
    ]
    daemons = [
        [
            "munged",
            "--foreground",
            "--force",
            f"--seed-file={tmp_path / 'munge.seed'}",
            f"--log-file={tmp_path / 'munge.log'}",
            *munge,
        ],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D", "-N", "one"],
        ["slurmd", "-D", "-N", "two"],
    ]
    with ExitStack() as stack:
        for argv in daemons:
            log = stack.enter_context((tmp_path / f"{'-'.join(argv[::3])[:20]}.out".replace("/", "_")).open("wb"))
            process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait, 60)
            stack.callback(process.terminate)
            if argv[0] == "munged":
                until(lambda: (tmp_path / "munge.socket").exists(), 30)
        until(lambda: ask(environment, "sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", 60)
        yield environment


def ask(environment: dict[str, str], *argv: str) -> str:
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False).stdout


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def job(environment: dict[str, str], number: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in ask(environment, "scontrol", "show", "job", number, "-o").split() if "=" in word)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(1500)
@pytest.mark.skipif(not all(map(shutil.which, TOOLS)), reason="needs Debian's slurmctld, slurmd, slurm-client and munge")
def test_a_job_trains_and_continues_after_its_time_limit(slurm: dict[str, str], tmp_path: Path) -> None:
    data = tmp_path / "data"
    subprocess.run([sys.executable, EXAMPLE / "prepare.py", "--out", data], check=True, timeout=300)
    shutil.copy(EXAMPLE / "run.yaml", tmp_path)
    runs = tmp_path / "runs"
    warm = f"trainer.sft=[{{data: '{data / 'sft_short.jsonl'}', steps: 20, batch_size: 16, lr: 2.0e-3}}]"
    small = [
        "iterations=3",
        "groups_per_iteration=4",
        "eval_samples=16",
        "rollout.max_new_tokens=24",
        "trainer.save_interval=1",
        warm,
    ]
    environment = {**slurm, "CONFIG": str(tmp_path / "run.yaml"), "RUNS": str(runs), "REDIS_PORT": str(free_ports(1)[0])}
    script = ROOT / "deploy" / "slurm" / "polyreme.sbatch"
    command = ["sbatch", "--parsable", f"--output={tmp_path / 'job.log'}", script, *small]
    submitted = subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=60)
    number = submitted.stdout.strip()
    records = runs / "running-total" / "metrics.jsonl"
    trained = '"kind": "iteration"'
    until(lambda: (records.exists() and trained in records.read_text()) or job(slurm, number)["JobState"] == "FAILED", 600)
    subprocess.run(["scancel", "--batch", "--signal=TERM", number], env=slurm, check=True, timeout=60)
    until(lambda: job(slurm, number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), 900)
    ended = job(slurm, number)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), (tmp_path / "job.log").read_text()[-5000:]
    summary = json.loads((runs / "running-total" / "summary.json").read_text())
    assert (summary["state"], summary["iterations"]) == ("done", 3)
