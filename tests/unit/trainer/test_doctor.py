"""The trainer's verdicts from what torch reports, and its self-test on this machine."""

import os
from pathlib import Path
from typing import Any

import pytest

from polyreme_trainer.doctor import (
    _children,
    collective_verdict,
    device_verdict,
    driver_verdict,
    mindspeed_verdict,
    optimizer_verdicts,
)
from polyreme_trainer.megatron.mindspeed import choose

NONE: dict[str, Any] = {"torch": "2.13.0", "cuda_build": None, "cuda": [], "npu": []}
CUDA_WITHOUT_DRIVER = {**NONE, "cuda_build": "13.0"}
H100 = {**CUDA_WITHOUT_DRIVER, "cuda": ["NVIDIA H100 80GB HBM3"] * 8}
ASCEND = {**NONE, "npu": ["Ascend910_9392"] * 16}


@pytest.mark.parametrize(
    ("wanted", "facts", "kind", "level"),
    [
        (None, NONE, "cpu", "ok"),
        ("cpu", NONE, "cpu", "ok"),
        ("cuda", NONE, None, "missing"),
        ("npu", NONE, None, "missing"),
        (None, CUDA_WITHOUT_DRIVER, "cpu", "ok"),
        ("cuda", CUDA_WITHOUT_DRIVER, None, "missing"),
        (None, H100, "cuda", "ok"),
        ("npu", H100, None, "missing"),
        (None, ASCEND, "npu", "ok"),
    ],
)
def test_devices(wanted: str | None, facts: dict[str, Any], kind: str | None, level: str) -> None:
    found, verdict = device_verdict(wanted, facts)
    assert (found, verdict.level) == (kind, level)
    assert bool(verdict.do) == (level == "missing")


def test_a_missing_device_is_explained_by_its_cause() -> None:
    assert "requirements/cuda.txt" in device_verdict("cuda", NONE)[1].do
    assert "nvidia-smi" in device_verdict("cuda", CUDA_WITHOUT_DRIVER)[1].do
    assert "npu-smi" in device_verdict("npu", NONE)[1].do


def test_a_package_whose_adam_a_learner_refuses_is_named() -> None:
    assert list(optimizer_verdicts({"transformer-engine": None, "apex": None})) == []
    [verdict] = optimizer_verdicts({"transformer-engine": "2.20.2", "apex": None})
    assert verdict.level == "missing" and "transformer-engine" in verdict.do


def test_devices_of_one_kind_are_counted() -> None:
    assert "8 x NVIDIA H100" in device_verdict(None, H100)[1].found


@pytest.mark.parametrize(
    ("kind", "text", "version"),
    [
        ("cuda", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 02:03:04 UTC 2025\nGCC version:  12.2.0", "570.124.06"),
        ("cuda", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.54  Release Build", "535.54"),
        ("npu", "Version=25.2.0\nascendhal_version=7.35.23", "25.2.0"),
        ("npu", "Version=25.3.rc1.2\n", "25.3.rc1.2"),
    ],
)  # fmt: skip
def test_a_driver_is_named_by_its_version(kind: str, text: str, version: str) -> None:
    verdict = driver_verdict(kind, text)
    assert (verdict.level, verdict.found, verdict.do) == ("ok", f"{kind} {version}", "")


@pytest.mark.parametrize(("kind", "text"), [("cuda", None), ("npu", None), ("npu", "")])
def test_a_driver_without_a_version_is_noted(kind: str, text: str | None) -> None:
    verdict = driver_verdict(kind, text)
    assert verdict.level == "note" and verdict.do


def test_a_mindspeed_that_is_not_used_is_a_note_with_advice() -> None:
    levels = {version: mindspeed_verdict(choose(version, True, "0.16.1")) for version in ("0.16.0", "0.12.1")}
    assert [(verdict.level, bool(verdict.do)) for verdict in levels.values()] == [("ok", False), ("note", True)]
    assert all(version is not None and version in verdict.found for version, verdict in levels.items())
    assert mindspeed_verdict(choose(None, False, "0.16.1")).level == "ok"


@pytest.mark.parametrize("kind", ["cpu", "cuda", "npu"])
def test_a_collective_that_fails_says_what_to_look_at(kind: str) -> None:
    assert collective_verdict(kind, 2, None).level == "ok"
    failed = collective_verdict(kind, 2, "no answer within 120 s")
    assert failed.level == "missing" and failed.do and "no answer" in failed.found


def test_a_process_that_hangs_ends_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a broken driver. The first process ends in time."""
    (tmp_path / "hangs.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['PIDS'], str(os.getpid())).touch()\n"
        "while os.environ['RANK'] == '1': time.sleep(60)\n"
        "print('{}')\n"
    )
    (tmp_path / "pids").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    answers, failure = _children(["npu"], 3, "hangs", 3.0)
    assert answers == [] and failure is not None and "no answer within 3 s" in failure
    for path in (tmp_path / "pids").iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


@pytest.mark.real
def test_the_self_test_sums_over_two_processes() -> None:
    answers, failure = _children(["cpu"], 2)
    assert failure is None
    assert answers == [{"backend": "gloo", "ranks": 2}] * 2


@pytest.mark.real
def test_a_self_test_that_fails_reports_the_last_line_of_its_error() -> None:
    _, failure = _children(["npu"])
    assert failure is not None and "torch_npu" in failure
