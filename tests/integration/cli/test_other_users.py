"""Runs whose directories can only be read: those of another user, and copies on a mount without write access."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from polyreme.config.run import RunConfig
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.run import Run
from polyreme.experience.store import connected
from polyreme.isolation.sandbox import bubblewrap
from polyreme.rundir.reader import RunReader
from polyreme.rundir.run_directory import read_config, read_run_file
from support.commands import polyreme
from support.recorded_run import record_run
from support.users import SERVICE_USER, as_user

_READ = "import sys; from polyreme.cli.main import main; sys.argv[0] = 'polyreme'; main()"


@pytest.mark.parametrize("shared", [False, True])  # a folder that a group may write to has indexes of its other members
def test_a_run_of_another_user_is_read_with_an_own_index(shared: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = record_run(Path(folder))
        RunReader(run_dir).refresh()
        os.chmod(folder, 0o755)
        run_dir.chmod(0o777 if shared else 0o755)
        command = as_user(SERVICE_USER, [sys.executable, "-c", _READ])
        if command is None:
            pytest.skip("needs root, bubblewrap and setpriv")

        def told(*words: str, cache: str) -> "subprocess.CompletedProcess[str]":
            return subprocess.run([*command, *words], env={**os.environ, "XDG_CACHE_HOME": cache}, capture_output=True, text=True)

        (cache := Path(folder, "cache")).mkdir()
        shutil.chown(cache, SERVICE_USER)
        read = told("samples", str(run_dir), "--json", cache=str(cache))
        assert read.returncode == 0 and len(read.stdout.splitlines()) == 8, read.stderr
        assert told("status", str(run_dir), cache="/proc/none").returncode == 0, "a status needs no index"
        refused = told("samples", str(run_dir), cache="/proc/none")
        assert refused.returncode == 2 and "XDG_CACHE_HOME" in refused.stderr


async def create_run(url: str, run_id: str, config: RunConfig) -> None:
    async with connected(url) as redis:
        await Run.create(redis, run_id, config, {})


def content(run_dir: Path) -> dict[Path, tuple[int, float]]:
    return {path: (path.stat().st_mode, path.stat().st_mtime) for path in [run_dir, *run_dir.rglob("*")]}


def audited_run(folder: Path) -> Path:
    """An ended run with its own Redis."""
    run_dir = record_run(folder)
    found = read_run_file(run_dir)
    assert found is not None
    with EmbeddedServer.start(run_dir / "redis") as server:
        asyncio.run(create_run(server.url, found.run_id, read_config(run_dir)))
    return run_dir


def test_an_audit_writes_nothing_into_an_ended_run(tmp_path: Path) -> None:
    run_dir = audited_run(tmp_path)
    before = content(run_dir)
    done = polyreme("audit", str(run_dir))
    assert done.returncode == 0, done.stderr
    assert content(run_dir) == before


@pytest.mark.parametrize("command", ["audit", "status", "samples"])
def test_a_run_on_a_read_only_mount_is_read(command: str, tmp_path: Path) -> None:
    if (wrap := bubblewrap.executable()) is None:
        pytest.skip("needs bubblewrap")
    run_dir = audited_run(tmp_path)
    mounted = [wrap, "--dev-bind", "/", "/", "--ro-bind", str(run_dir), str(run_dir)]
    line = [*mounted, sys.executable, "-c", _READ, command, str(run_dir)]
    done = subprocess.run(line, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
