"""A replica on another machine with its own address, loopback and /dev/shm, started by the command in docs/machines.md."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import redis as redis_py

from polyreme.experience.embedded_redis import redis_binary
from polyreme.process.lifecycle import Child
from support.machines import Machine, Network
from support.whole_run import make_task

ROOT = Path(__file__).resolve().parents[2]
PASSWORD, TOKEN = "open-sesame", "s3cret-token"
PORT = 16379


def documented(address: str) -> tuple[dict[str, str], list[str]]:
    """The remote command of the guide with our address and secrets: its environment and arguments."""
    lines = (ROOT / "docs" / "machines.md").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("POLYREME_REDIS_PASSWORD=... ")]
    words = shlex.split(line)
    command = words[words.index("polyreme") :]
    environment = {
        word.partition("=")[0]: secret for word, secret in zip(words[: len(words) - len(command)], (PASSWORD, TOKEN), strict=True)
    }
    return environment, [word.replace("10.0.0.1", address) for word in command]


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(1800)
async def test_the_remote_command_adds_a_machine_to_a_run(net: Network, tmp_path: Path) -> None:
    first, second = net.add(), net.add()
    task = make_task(tmp_path)
    environment, rollout = documented(first.address)
    assert environment == {"POLYREME_REDIS_PASSWORD": PASSWORD, "POLYREME_TOKEN": TOKEN}
    url = f"redis://{first.address}:{PORT}/0"
    options = {"bind": first.address, "port": str(PORT), "dir": str(tmp_path), "save": "", "requirepass": PASSWORD}
    options |= {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}
    server = [redis_binary(), *(word for name, value in options.items() for word in (f"--{name}", value))]
    train = ["polyreme", "train", str(task), "iterations=4", "security.token_env=POLYREME_TOKEN", "--redis", url]
    children: list[Child] = []

    def start(name: str, machine: Machine, command: list[str]) -> Child:
        argv = [sys.executable, "-m", *command] if command[0] == "polyreme" else command
        children.append(Child.spawn(name, machine.command(argv), environment, tmp_path / f"{name}.log"))
        return children[-1]

    def logs() -> str:
        return "\n".join(f"== {path}\n{path.read_text()[-2000:]}" for path in sorted(tmp_path.rglob("*.log")))

    try:
        start("redis", first, server)
        start("reward", first, ["polyreme", "reward", "--redis", url])
        start("rollout", second, rollout)
        trainer = start("train", first, train)
        assert await trainer.wait() == 0, logs()
        run_dir = tmp_path / "runs" / "run"
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        assert {record["path"] for record in records if record["kind"] == "commit"} <= {"stream", "delta"}
        joined = [record["text"] for record in records if record["kind"] == "notice" and " joined" in record["text"]]
        assert joined and all(f" at {second.address}:" in text for text in joined)
        assert [record["iteration"] for record in records if record["kind"] == "iteration"] == [1, 2, 3, 4]
        assert PASSWORD not in (run_dir / "run.json").read_text() + (run_dir / "config.yaml").read_text()
        with redis_py.Redis(host=first.address, port=PORT, password=PASSWORD) as store:  # this process is also on the network
            assert store.ping()
        audit = [sys.executable, "-m", "polyreme", "audit", "--redis", url]
        assert await Child.spawn("audit", audit, environment, tmp_path / "audit.log").wait() == 0, logs()
    finally:
        for child in reversed(children):
            await child.stop(30)
