"""Runs of another user, whose directories can only be read."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from polyreme.rundir.reader import RunReader
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
