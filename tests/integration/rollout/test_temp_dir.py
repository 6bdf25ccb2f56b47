"""A replica removes its temporary directory at its end, and those of killed replicas at its start."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyreme_rollout.replica import replica_temp_dir

HOLDER = (
    "import time\nfrom polyreme_rollout.replica import replica_temp_dir\n"
    "with replica_temp_dir() as folder:\n    (folder / 'file').touch()\n    print(folder, flush=True)\n    time.sleep(600)\n"
)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """The directory of temporary files: empty, with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="p") as folder:
        yield Path(folder)


def test_it_is_there_for_the_block_alone(temporary: Path) -> None:
    with replica_temp_dir({"TMPDIR": str(temporary)}) as folder:
        (folder / "file").touch()
        assert [*temporary.iterdir()] == [folder]
    assert not [*temporary.iterdir()]


def test_a_living_replica_keeps_its_own_and_a_killed_one_is_cleared_up(temporary: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)}
    )
    assert holder.stdout is not None
    with holder, holder.stdout:
        theirs = Path(holder.stdout.readline().strip())
        with replica_temp_dir({"TMPDIR": str(temporary)}):
            assert (theirs / "file").exists()
        holder.send_signal(signal.SIGKILL)
    assert theirs.exists()
    with replica_temp_dir({"TMPDIR": str(temporary)}):
        assert not theirs.exists()


@pytest.mark.parametrize("length", [20, 44, 45, 90, 200])
def test_a_socket_of_the_engine_fits_below_any_tmpdir(length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="p") as short:
        long = Path(short, "x" * max(1, length - len(short) - 1))
        long.mkdir()
        with replica_temp_dir({"TMPDIR": str(long)}) as folder, socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{folder}/{uuid.uuid4()}")
            assert (folder.parent == long) == (length <= 44)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert not folder.exists()


def test_a_link_to_a_directory_of_its_name_is_left_alone(temporary: Path, tmp_path: Path) -> None:
    (precious := tmp_path / "precious").mkdir()
    (precious / "file").touch()
    (temporary / "polyreme-rollout-theirs").symlink_to(precious)
    with replica_temp_dir({"TMPDIR": str(temporary)}):
        assert (precious / "file").exists() and (temporary / "polyreme-rollout-theirs").is_symlink()
