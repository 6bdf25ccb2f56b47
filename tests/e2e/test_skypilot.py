"""The task of deploy/skypilot, read by SkyPilot's own package."""

import json
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READ = """
import json, sys, yaml, sky
task = sky.Task.from_yaml("deploy/skypilot/polyreme.yaml")
config = yaml.safe_load(open("deploy/skypilot/polyreme.yaml"))
try:
    sky.Task.from_yaml_config({**config, "nodes": 3})
    refused = ""
except Exception as error:
    refused = str(error)
print(json.dumps({"nodes": task.num_nodes, "names": sorted([*task.envs, *config["secrets"]]), "refused": refused, "run": task.run}))
"""


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(1800)
def test_the_task_is_one_of_skypilot(tmp_path: Path) -> None:
    """In an environment of its own, since SkyPilot's lock differs from ours."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    lock = ROOT / "requirements" / "skypilot.txt"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-r", lock], check=True, timeout=1500)
    clean = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([python, "-c", READ], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["nodes"] == 2 and "nodes" in found["refused"]
    assert {"CONFIG", "RUNS", "LEARNERS", "POLYREME_REDIS_PASSWORD", "POLYREME_TOKEN"} == {*found["names"]}
    # What every machine gets from SkyPilot: https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html
    assert [
        word for word in ("$SKYPILOT_NODE_RANK", "$SKYPILOT_NUM_NODES", "$SKYPILOT_NODE_IPS") if word not in found["run"]
    ] == []
