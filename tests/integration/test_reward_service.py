"""`polyreme reward` as a process: its lease, its end, its errors."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from polyreme.api.v1 import reward_pb2, reward_pb2_grpc
from polyreme.errors import GateError
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.run import Run, RunState
from polyreme.net import rpc
from polyreme.net.endpoint import Endpoint
from polyreme.net.seal import SEAL
from polyreme_reward.server import serve
from support.commands import Fork, piped
from support.configs import run_config
from support.processes import runs
from support.rewards import reward_config
from support.simulated import ROWS, config_tree
from support.waiting import until

SLOW = """
import pathlib, time
def reward(response):
    pathlib.Path({asked!r}).touch()
    time.sleep(float(response))
    return 1.0
"""


def command(*arguments: str) -> AbstractContextManager[Fork]:
    """`polyreme reward ARGUMENTS`, killed if it does not end by itself."""
    return piped("polyreme", ["reward", *arguments], os.environ)


@pytest.fixture
async def reward_run(redis: Redis, run_id: str, tmp_path: Path) -> Run:
    """A run whose rewards are the demo's rule and a slow plugin."""
    plugin = tmp_path / "slow.py"
    plugin.write_text(SLOW.format(asked=str(tmp_path / "asked")))
    rewards = reward_config({"name": "numeric"}, {"file": str(plugin)})
    return await Run.create(redis, run_id, run_config(tmp_path, reward=rewards), {"config.json": b"{}", "tokenizer.json": b"{}"})


async def lease(run: Run) -> Lease:
    (found,) = await Registry(run).wait_for("reward", 1, 300)
    return found


def request(response: str) -> reward_pb2.ScoreRequest:
    return reward_pb2.ScoreRequest(run_id="r", items=[reward_pb2.ScoreItem(prompt="p", response=response, label="1")])


async def test_a_server_registers_scores_and_drains_on_sigterm(redis_url: str, reward_run: Run, tmp_path: Path) -> None:
    with command("--redis", redis_url, "--run", reward_run.run_id) as process:
        found = await lease(reward_run)
        assert (found.kind, found.api) == ("reward", 1)
        assert [r["name"] for r in found.facts["rewards"]] == ["numeric", "slow"]
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2, "the keeper and one worker"
        async with rpc.connect(found.address) as channel:
            score = reward_pb2_grpc.RewardServiceStub(channel).Score
            call = asyncio.ensure_future(score(request("1"), timeout=300))
            await until((tmp_path / "asked").exists)
            process.terminate()
            assert (await call).results[0].score == 2.0, "what was under way is answered"
        assert await asyncio.to_thread(process.wait) == 0
        assert await Registry(reward_run).leases("reward") == []
        assert not [child for child in children if runs(child)]


async def test_a_server_of_the_newest_run_waits_where_that_has_no_rewards(
    redis: Redis, redis_url: str, run_id: str, tmp_path: Path
) -> None:
    """A container starts before it knows the run, so it must wait. For a named run it is an error."""
    distils = {"reward": None, "algorithm": {"preset": "distillation"}, "teacher": {"url": "http://127.0.0.1:9/v1"}}
    run = await Run.create(redis, run_id, config_tree(tmp_path, ROWS, **distils), {"config.json": b"{}", "tokenizer.json": b"{}"})
    with command("--redis", redis_url) as process:
        assert process.stdout is not None
        while "has no rewards" not in (line := await asyncio.to_thread(process.stdout.readline)):
            assert line, "it has ended"
        await run.set_state(RunState.DONE)
        assert await asyncio.to_thread(process.wait) == 0
    code, text = await error_of("--redis", redis_url, "--run", run_id)
    assert (code, "a section `reward`" in text) == (2, True)


@pytest.mark.parametrize(
    ("host", "advertise", "told"),
    [("127.0.0.1", None, "127.0.0.1:own"), ("0.0.0.0", "proxy", "proxy:own"), ("127.0.0.1", "proxy:80", "proxy:80")],
)
async def test_the_advertised_address(host: str, advertise: str | None, told: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with serve(reward_config({"name": "exact"}), Endpoint(host, port, advertise=advertise)) as addresses:
        assert addresses.grpc == told.replace("own", str(port))
        assert addresses.http.partition(":")[0] == told.partition(":")[0]


async def test_a_killed_server_leaves_no_process_behind(redis_url: str, reward_run: Run) -> None:
    with command("--redis", redis_url, "--run", reward_run.run_id) as process:
        await lease(reward_run)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        gone, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=300)
        assert (len(gone), alive) == (2, [])


async def error_of(*arguments: str) -> tuple[int, str]:
    with command(*arguments) as process:
        assert process.stdout is not None
        text = await asyncio.to_thread(process.stdout.read)
        return process.wait(), text


async def test_a_configuration_that_others_wrote_into_redis_is_refused(
    redis_url: str, redis: Redis, reward_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it names a Python file that would run with the rights of this user."""
    monkeypatch.setenv(SEAL, reward_run.seal)
    (theirs := tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nreward = len\n")
    config = json.loads(await redis.get(reward_run.key("config")) or b"")
    config["reward"]["rewards"] = [{"file": str(theirs)}]
    await redis.set(reward_run.key("config"), json.dumps(config))
    status, said = await error_of("--redis", redis_url, "--run", reward_run.run_id)
    assert status == GateError.exit_code
    assert "configuration of run" in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("option", ["--port", "--http-port"])
async def test_a_taken_port_is_one_clear_error(tmp_path: Path, option: str) -> None:
    config = tmp_path / "rewards.yaml"
    config.write_text("reward: {rewards: [{name: exact}]}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, text = await error_of("--config", str(config), option, str(taken.getsockname()[1]))
    assert (code, "Traceback" in text) == (2, False)
    assert "a free port" in text


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        ("reward: {rewards: [{name: exakt}]}", "Did you mean exact"),
        ("reward: {rewards: [{name: exact, option: {}}]}", "did you mean reward.rewards.options"),
        ("reward: {rewards: [{url: 'http://h/'}]}", "`url` and `protocol`"),
        ("reward: {rewards: [{name: exact}, {name: exact}]}", "two rewards are called exact"),
        ("reward: {rewards: [{file: missing.py}]}", "missing.py"),
        ("reward: {rewards: []}", "at least 1 item"),
        ("reward: [", "YAML"),
    ],
)
async def test_a_configuration_that_cannot_be_used_is_one_clear_error(tmp_path: Path, yaml: str, said: str) -> None:
    config = tmp_path / "rewards.yaml"
    config.write_text(yaml)
    code, text = await error_of("--config", str(config))
    assert (code, "Traceback" in text) == (2, False), text
    assert said in text


async def test_neither_redis_nor_file_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYREME_REDIS", raising=False)
    code, text = await error_of()
    assert (code, "--config FILE" in text) == (2, True)


async def test_importing_the_service_is_light() -> None:
    heavy = "{'torch', 'vllm', 'transformers', 'megatron', 'math_verify', 'sympy', 'httpx'}"
    code = f"import sys, polyreme_reward.server, polyreme_reward.command; print({heavy} & set(sys.modules))"
    assert await asyncio.to_thread(subprocess.check_output, [sys.executable, "-c", code], text=True) == "set()\n"
