"""A replica removes its temporary directory at its end, and those of killed replicas at its start."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from polyreme_rollout.temp_dir import replica_temp_dir

HOLDER = (
    "import time\nfrom polyreme_rollout.temp_dir import replica_temp_dir\n"
    "with replica_temp_dir() as folder:\n    (folder / 'file').touch()\n    print(folder, flush=True)\n    time.sleep(600)\n"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_it_is_there_for_the_block_alone(tmp_path: Path) -> None:
    with replica_temp_dir() as folder:
        (folder / "file").touch()
        assert [*tmp_path.iterdir()] == [folder]
    assert not [*tmp_path.iterdir()]


def test_a_living_replica_keeps_its_own_and_a_killed_one_is_cleared_up(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert holder.stdout is not None
    with holder, holder.stdout:
        theirs = Path(holder.stdout.readline().strip())
        with replica_temp_dir():
            assert (theirs / "file").exists()
        holder.send_signal(signal.SIGKILL)
    assert theirs.exists()
    with replica_temp_dir():
        assert not theirs.exists()
