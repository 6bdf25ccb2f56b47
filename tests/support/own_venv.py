"""Packages that contradict the lock: each is installed into an environment of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"


def own_venv(name: str, folder: Path, python: str = sys.executable) -> Path:
    """The folder of commands of an environment with requirements/NAME.txt. POLYREME_NAME, such as POLYREME_LM_EVAL, names an existing one.

    Skips the test where there is no such Python.
    """
    if given := os.environ.get(f"POLYREME_{name.upper().replace('-', '_')}"):
        return Path(given)
    # A version manager has a command on the path for each Python that it could start, also where none is chosen.
    about = [python, "-c", "import sys; print('{}.{}.99'.format(*sys.version_info))"]
    if shutil.which(python) is None or (found := subprocess.run(about, capture_output=True, text=True, timeout=60)).returncode:
        pytest.skip(f"needs {python}")
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True, timeout=300)
    # Some packages ask for a release of Python that is newer than they need.
    to = ["--python", str(folder / "bin" / "python"), "--python-version", found.stdout.strip()]
    install = [sys.executable, str(REQUIREMENTS / "uv.py"), "install", "-q", *to, "--no-deps"]
    subprocess.run([*install, "-r", str(REQUIREMENTS / f"{name}.txt")], check=True, timeout=1800)
    return folder / "bin"
