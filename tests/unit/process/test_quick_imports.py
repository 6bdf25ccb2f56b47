"""Imports in less time: the block's effects, and the answer that transformers gets."""

import gc
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from polyreme.process.quick_imports import packages, quick_imports


def _sorted(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: sorted(owners) for name, owners in found.items()}


def test_packages_are_those_of_the_standard_library() -> None:
    assert _sorted(packages()) == _sorted(dict(importlib.metadata.packages_distributions()))


_COMPARE = """
import sys
from importlib.metadata import packages_distributions
from polyreme.process.quick_imports import packages
sys.path[:] = sys.argv[1:]
found, expected = [{name: sorted(owners) for name, owners in each().items()} for each in (packages, packages_distributions)]
assert found == expected and "four" in found, (found, expected)
"""


def test_packages_of_unusual_distributions(tmp_path: Path) -> None:
    def distribution(folder: str, **files: str) -> None:
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name.replace("_txt", ".txt").replace("PKG_INFO", "PKG-INFO")).write_text(text)

    record = 'one.py,,\ntwo/__init__.py,,\n"two/a,b.py",,\ntwo/data.json,,\n../../bin/tool,,\nthree.cpython-311-x86_64-linux-gnu.so,,\n'
    distribution("wheel-1.dist-info", METADATA="Metadata-Version: 2.1\nname:  A.Wheel \n\nName: no\n", RECORD=record)
    distribution("declared-1.dist-info", METADATA="Name: declared\n", top_level_txt="four\nfive\n", RECORD=record)
    distribution("empty-1.dist-info", METADATA="Name: empty\n")
    distribution("old-1.egg-info", PKG_INFO="Name: old\n", SOURCES_txt="setup.py\nsix/__init__.py\n")
    for name in ("setup.py", "six"):
        (tmp_path / name).mkdir()
    (tmp_path / "six" / "__init__.py").touch()
    subprocess.run([sys.executable, "-c", _COMPARE, str(tmp_path)], check=True, timeout=60)


def test_a_block_restores_the_collector_and_the_library() -> None:
    before = importlib.metadata.packages_distributions
    assert gc.isenabled()
    with quick_imports():
        assert not gc.isenabled()
        with pytest.raises(ImportError), quick_imports():
            raise ImportError
        assert not gc.isenabled()
    assert gc.isenabled() and importlib.metadata.packages_distributions is before
