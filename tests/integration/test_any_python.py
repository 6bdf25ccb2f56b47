"""requirements/venv.sh makes an environment with whatever Python is on PATH, or with uv alone."""

import ensurepip
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from hashlib import sha256
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "requirements" / "venv.sh"
UV = Path(sys.executable).with_name("uv")
PYTHON = Path(os.path.realpath(sys.executable))
"""The interpreter behind this environment's."""
WHEELS = Path(ensurepip.__file__).parent / "_bundled"
VERSION = ".".join(map(str, sys.version_info[:3]))


def only(folder: Path, **programs: Path) -> Path:
    """Creates a folder for PATH with the tools of every machine and the given programs, and no other."""
    folder.mkdir(exist_ok=True)
    tools = {name: Path(found) for name in ("sh", "dirname", "uname", "rm") if (found := shutil.which(name))}
    for name, program in {**tools, **programs}.items():
        (folder / name).symlink_to(program)
    return folder


def make(path: Path, venv: Path, *python: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs the script with only `path` as PATH."""
    wheels = WHEELS if WHEELS.is_dir() else Path("/usr/share/python-wheels")  # Debian's place
    environment = {
        "PATH": str(path),
        "HOME": str(path),
        "UV_DEFAULT_INDEX": path.as_uri(),
        "UV_FIND_LINKS": str(wheels),
        **variables,
    }
    return subprocess.run(
        ["sh", str(SCRIPT), str(venv), *map(str, python)], capture_output=True, text=True, timeout=300, env=environment
    )


def version_in(venv: Path) -> str:
    """The version of the environment's Python, which has pip."""
    subprocess.run([venv / "bin" / "pip", "--version"], check=True, capture_output=True, timeout=60)
    return subprocess.run([venv / "bin" / "python", "-V"], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def without(folder: Path, *modules: str) -> Path:
    """A Python that lacks modules, as Debian's does without its package python3-venv."""
    (folder / "lacking").mkdir()
    for module in modules:
        (folder / "lacking" / f"{module}.py").write_text("raise ImportError\n")
    program = folder / "python-lacking"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}/lacking" exec "{PYTHON}" "$@"\n')
    program.chmod(0o755)
    return program


def archive(folder: Path) -> Path:
    """A tar file with this Python as uv downloads it: its interpreter and standard library."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))

    def keep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        unused = {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "tkinter"}
        return None if unused & {*Path(member.name).parts} or member.name.endswith(".a") else member

    with tarfile.open(folder / "python.tar.gz", "w:gz", compresslevel=1) as tar:
        tar.add(PYTHON, f"python/bin/{name}")
        tar.add(library, f"python/lib/{name}", filter=keep)
        for shared in Path(sys.base_prefix, "lib").glob(f"lib{name}.so*"):
            tar.add(shared, f"python/lib/{shared.name}")
    return folder / "python.tar.gz"


def test_the_first_python_that_works_is_taken_whatever_its_name(tmp_path: Path) -> None:
    (broken := tmp_path / "broken").write_text("#!/bin/sh\nexit 127\n")  # such as a shim of pyenv
    broken.chmod(0o755)
    path = only(tmp_path / "path", **{"python3.11": broken, "python3.12": broken, "python3": PYTHON})
    done = make(path, tmp_path / "a b" / "venv")
    assert done.returncode == 0 and f"Python {VERSION}" in done.stdout, done
    assert version_in(tmp_path / "a b" / "venv") == f"Python {VERSION}"


def test_a_python_without_venv_is_used_through_uv(tmp_path: Path) -> None:
    path = only(tmp_path / "path", python3=without(tmp_path, "ensurepip", "pip"), uv=UV)
    done = make(path, tmp_path / "venv")
    assert done.returncode == 0 and "with uv" in done.stdout, done
    assert version_in(tmp_path / "venv") == f"Python {VERSION}"


def test_uv_alone_downloads_a_python_into_the_environment(tmp_path: Path) -> None:
    tar = archive(tmp_path)
    major, minor, patch = sys.version_info[:3]
    entry = {"name": "cpython", "os": "linux", "libc": "gnu", "arch": {"family": "x86_64", "variant": None}, "variant": None}
    entry |= {"major": major, "minor": minor, "patch": patch, "prerelease": "", "url": tar.as_uri()}
    entry |= {"sha256": sha256(tar.read_bytes()).hexdigest()}
    (tmp_path / "downloads.json").write_text(json.dumps({f"cpython-{VERSION}-linux-x86_64-gnu": entry}))
    path, venv = only(tmp_path / "path", uv=UV), tmp_path / "a b" / "venv"
    done = make(path, venv, UV_PYTHON_DOWNLOADS_JSON_URL=str(tmp_path / "downloads.json"))
    assert done.returncode == 0 and "uv downloads 3.11" in done.stdout, done
    assert version_in(venv) == f"Python {VERSION}"
    assert Path(os.path.realpath(venv / "bin" / "python")).is_relative_to(venv / "python")
    assert not (path / ".local").exists() and not (path / ".cache").exists()


def test_a_machine_without_python_and_uv_is_told_what_to_install(tmp_path: Path) -> None:
    done = make(only(tmp_path / "path"), tmp_path / "venv")
    assert done.returncode == 1 and "found none on PATH. Fix: " in done.stderr, done


def test_a_chosen_python_without_venv_is_an_error(tmp_path: Path) -> None:
    done = make(only(tmp_path / "path"), tmp_path / "venv", without(tmp_path, "ensurepip"))
    assert done.returncode == 1 and "python3-venv" in done.stderr, done
