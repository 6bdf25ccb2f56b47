"""When a learner's rank imports MindSpeed's adaptor, and how.

The package itself needs an NPU. A package of its name, laid out on disk with the same module, stands in for it: it records how it is imported.
"""

import json
import logging
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from polyreme_trainer.megatron.mindspeed import DEVICE, choose, log_choice

ADAPTOR = """
import json, os, pathlib, sys
facts = {"argv": sys.argv[1:], "megatron": sorted(name for name in sys.modules if name.startswith("megatron"))}
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(facts))
if "BROKEN" in os.environ:
    raise ImportError("no libhccl.so")
"""


def lay_out(folder: Path, number: str, adaptor: bool = True) -> Path:
    """A site directory with an installed package `mindspeed`."""
    (folder / "mindspeed").mkdir(parents=True)
    (folder / "mindspeed" / "__init__.py").touch()
    if adaptor:
        (folder / "mindspeed" / "megatron_adaptor.py").write_text(ADAPTOR)
    (folder / f"mindspeed-{number}.dist-info").mkdir()
    (folder / f"mindspeed-{number}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: mindspeed\nVersion: {number}\n"
    )
    return folder


def run(
    site: Path, program: str, device: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any] | None]:
    """A process with the package, and what its adaptor recorded when it was imported; None: it was not."""
    seen = site / "seen.json"
    paths = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, DEVICE: device, "SEEN": str(seen), "PYTHONPATH": paths, **variables}
    command = [sys.executable, "-c", program, "--config", "run.yaml"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return ended, json.loads(seen.read_text()) if seen.exists() else None


MEGATRON = "0.16.1"
OURS = ".".join(version("megatron-core").split(".")[:2])
"""The release of the installed megatron-core."""


@pytest.mark.parametrize(
    ("installed", "adapts", "used", "advises"),
    [
        ("0.16.0", True, True, False),
        ("0.16.3", True, True, False),
        ("0.12.1", True, False, True),
        ("0.160.0", True, False, True),
        ("0.16.0", False, False, True),
        (None, False, False, False),
    ],
)
def test_only_the_adaptor_of_the_installed_megatron_core_is_used(
    installed: str | None, adapts: bool, used: bool, advises: bool
) -> None:
    made = choose(installed, adapts, MEGATRON)
    assert (made.used, bool(made.do)) == (used, advises)
    assert installed is None or installed in made.found
    assert not advises or "core_r0.16.0" in made.do


def test_it_is_imported_before_megatron_core_at_its_lowest_level_and_sees_no_arguments_of_ours(tmp_path: Path) -> None:
    program = "import sys; from polyreme_trainer.megatron.mcore import GPTModel; print(sys.argv[1:])"
    ended, seen = run(lay_out(tmp_path, f"{OURS}.0"), program, "npu")
    assert ended.returncode == 0, ended.stderr
    assert seen == {"argv": ["--optimization-level", "0", "--optimizer-selection", "fused_torch_adamw"], "megatron": []}
    assert ended.stdout.strip() == "['--config', 'run.yaml']"


ADAPT = "from polyreme_trainer.megatron.mindspeed import adapt; adapt()"


@pytest.mark.parametrize(
    ("installed", "adaptor", "device"),
    [(f"{OURS}.0", True, "cpu"), (f"{OURS}.0", True, "cuda"), ("0.12.1", True, "npu"), ("0.0.1", False, "npu")],
)
def test_it_is_not_imported_on_another_device_nor_for_another_megatron_core(
    installed: str, adaptor: bool, device: str, tmp_path: Path
) -> None:
    ended, seen = run(lay_out(tmp_path, installed, adaptor), ADAPT, device)
    assert (ended.returncode, seen) == (0, None), ended.stderr


def test_an_adaptor_that_cannot_be_imported_ends_the_rank_and_says_what_to_do(tmp_path: Path) -> None:
    ended, seen = run(lay_out(tmp_path, f"{OURS}.0"), ADAPT, "npu", BROKEN="1")
    assert ended.returncode and seen is not None
    assert "no libhccl.so" in ended.stderr and "uninstall mindspeed" in ended.stderr


def test_a_rank_logs_the_choice(caplog: pytest.LogCaptureFixture) -> None:
    for made, level in (
        (choose("0.16.0", True, MEGATRON), logging.INFO),
        (choose(None, False, MEGATRON), logging.INFO),
        (choose("0.12.1", True, MEGATRON), logging.WARNING),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            log_choice(made)
        [record] = caplog.records
        assert record.levelno == level and made.found in record.getMessage() and made.do in record.getMessage()
