"""MindSpeed's adaptor: Ascend's package that replaces functions of torch and megatron-core by ones for NPUs when it is imported.

A MindSpeed release is made for one release of megatron-core, whose number is its version: branch core_r0.16.0 is version 0.16.0.

Invariant: the adaptor is imported only for device npu, before megatron-core, and only if made for the installed megatron-core.
Another would silently put functions of other versions in place of those that sum gradients and step the optimizer.
"""

import importlib
import logging
import os
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

DEVICE = "POLYREME_DEVICE"
"""The environment variable with a rank's kind of device. A rank imports megatron-core before it reads its configuration."""
_PACKAGE, _MODULE = "mindspeed", "megatron_adaptor"
_ARGUMENTS = ("--optimization-level", "0", "--optimizer-selection", "fused_torch_adamw")
"""The adaptor reads `sys.argv`. Level 0 is the smallest set of replacements: attention, norms and rotary embeddings have kernels
in our own spec. Checkpoints hold the state of torch's AdamW, but by default the adaptor chooses another."""


@dataclass(frozen=True)
class Choice:
    """Whether the adaptor is used.

    Attributes:
        found: what is installed, and what a learner on npu uses.
        do: what to do if the installed one is not used; empty without any.
    """

    used: bool
    found: str
    do: str = ""


def choose(installed: str | None, adapts: bool, megatron: str) -> Choice:
    """The choice for one environment.

    Args:
        installed: MindSpeed's version; None: it is not installed.
        adapts: whether the installed package has the adaptor.
        megatron: the version of megatron-core.
    """
    if installed is None:
        return Choice(False, "no mindspeed: torch_npu's kernels")
    release = _release(megatron)
    advice = f"Install MindSpeed's branch core_r{release}.0 from its source, or uninstall mindspeed."
    if not adapts:
        return Choice(False, f"mindspeed {installed} is a placeholder without {_MODULE}: torch_npu's kernels", advice)
    if _release(installed) != release:
        found = f"mindspeed {installed} is made for another megatron-core than {megatron}: not used, torch_npu's kernels"
        return Choice(False, found, advice)
    return Choice(True, f"mindspeed {installed} adapts megatron-core {megatron}")


def _release(number: str) -> str:
    return ".".join(number.split(".")[:2])


def choice() -> Choice:
    """The choice for this environment. Imports nothing."""
    try:
        installed = version(_PACKAGE)
    except PackageNotFoundError:
        installed = None
    spec = find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else ()
    adapts = any((Path(folder) / f"{_MODULE}.py").is_file() for folder in folders)
    return choose(installed, adapts, version("megatron-core"))


def adapt() -> None:
    """Imports the adaptor if this is a rank on npu and the choice is to use it."""
    if os.environ.get(DEVICE) != "npu" or not choice().used:
        return
    arguments, sys.argv = sys.argv, [sys.argv[0], *_ARGUMENTS]
    try:
        importlib.import_module(f"{_PACKAGE}.{_MODULE}")
    except Exception as error:
        error.add_note(
            "MindSpeed's adaptor cannot be imported. Repair it, or uninstall mindspeed to learn with torch_npu's kernels."
        )
        raise
    finally:
        sys.argv = arguments


def log_choice(made: Choice) -> None:
    """Logs the choice of a rank on npu."""
    logger.log(logging.WARNING if made.do else logging.INFO, "%s%s", made.found, f". {made.do}" if made.do else "")
