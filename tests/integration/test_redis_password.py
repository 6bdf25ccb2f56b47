"""A run works with a password in the Redis URL, and only the environments of its processes contain the password."""

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from redis import Redis

from polyreme.config.run import RunConfig
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.rundir.run_directory import RunFile, read_run_file
from support.commands import polyreme, start
from support.processes import command_line, runs
from support.proxy import port_of
from support.simulated import ROWS, config_tree
from support.tiny_tokenizer import model_files
from support.waiting import wait_until

SECRET = "open-sesame"


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[str]:
    """The URL, without its password, of a Redis that requires SECRET."""
    with EmbeddedServer.start(tmp_path / "store") as server:
        with Redis.from_url(server.url) as client:
            client.config_set("rdbcompression", "no")  # the dump must be readable
            client.config_set("requirepass", SECRET)
        yield f"redis://127.0.0.1:{port_of(server.url)}/0"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Configuration of a run that can start. Its model has no weights, which are read only later."""
    for name, data in model_files().items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return config_tree(tmp_path, ROWS)


def test_it_is_in_no_record_no_argument_and_no_output(guarded: str, config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    url = guarded.replace("//", f"//:{SECRET}@")
    up = start("up", str(tmp_path / "run.yaml"), "--redis", url, together=True)
    output = tmp_path / "up.log"
    output.symlink_to(up.out)
    try:
        children = started(psutil.Process(up.pid), ("reward", "rollout", "train"), output)
        words = [word for child in children for word in command_line(child)]
    finally:
        up.process.kill()
    assert not psutil.wait_procs(children, timeout=300)[1]
    assert guarded in words
    assert not [word for word in words if SECRET in word]
    record = read_run_file(config.run_dir)
    assert record is not None and record.redis == guarded
    for path in (output, *config.run_dir.rglob("*")):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    with Redis.from_url(guarded, password=SECRET) as client:
        for key in client.scan_iter("*"):
            assert SECRET.encode() not in (client.dump(key) or b""), key


def started(up: psutil.Process, services: tuple[str, ...], output: Path) -> list[psutil.Process]:
    """The processes of these services, once all run their own program."""
    found: list[psutil.Process] = []

    def all_there() -> bool:
        assert runs(up), output.read_text()
        found[:] = [child for child in up.children() if set(command_line(child)) & set(services)]
        return len(found) == len(services)

    wait_until(all_there)
    return found


def test_a_record_of_an_earlier_release_that_has_it_is_used_and_it_is_not_shown(
    guarded: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POLYREME_REDIS_PASSWORD", raising=False)
    config.run_dir.mkdir(parents=True)
    record = RunFile("gone", guarded.replace("//", f"//:{SECRET}@"))
    (config.run_dir / "run.json").write_text(json.dumps(vars(record)))
    done = polyreme("audit", str(config.run_dir))
    assert "expected run gone in Redis; found none" in done.stderr
    assert SECRET not in done.stdout + done.stderr
