"""`polyreme demo`: trains the example of the running totals, also where there is no checkout.

Invariant: everything is written below one folder, and no file in it is overwritten.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from polyreme.errors import ConfigError

_FILES = ("prepare.py", "run.yaml")


def demo(
    folder: Annotated[Path, typer.Argument(help="Folder for the example and its run. Created if needed.")] = Path(
        "polyreme-demo"
    ),
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the run to change, as for `polyreme up`.")
    ] = None,
) -> None:
    """Train the example: a model with 0.8M parameters learns to add digits, in some minutes on two cores."""
    if "=" in folder.name:
        raise ConfigError("a folder before the keys", str(folder), "Write: polyreme demo FOLDER KEY=VALUE.")
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        if not (folder / name).exists():
            shutil.copyfile(example() / name, folder / name)
    subprocess.run([sys.executable, str(folder / "prepare.py")], check=True)
    # The transformers engine is a part of every installation, and slow; vLLM comes by device.
    engine = [] if find_spec("vllm") else ["rollout.engine=transformers", "rollout.vllm={}"]
    words = ["up", str(folder / "run.yaml"), f"output_dir={folder.resolve() / 'runs'}", *engine, *(changes or ())]
    os.execv(sys.executable, [sys.executable, "-m", "polyreme", *words])


def example() -> Path:
    """The folder with the example: in the installed package, or in the checkout that an editable installation uses."""
    package = Path(__file__).parent
    installed, checkout = package / "example", package.parents[2] / "examples" / "running_total"
    return installed if installed.is_dir() else checkout
