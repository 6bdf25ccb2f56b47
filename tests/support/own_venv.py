"""Packages that contradict the lock: each is installed into an environment of its own."""

import os
import subprocess
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements"


def own_venv(name: str, folder: Path) -> Path:
    """The folder of commands of an environment with requirements/NAME.txt. POLYREME_NAME, such as POLYREME_LM_EVAL, names an existing one."""
    if given := os.environ.get(f"POLYREME_{name.upper().replace('-', '_')}"):
        return Path(given)
    venv.create(folder, with_pip=True)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--no-deps", "-r", str(REQUIREMENTS / f"{name}.txt")]
    subprocess.run(install, check=True, timeout=1800)
    return folder / "bin"
