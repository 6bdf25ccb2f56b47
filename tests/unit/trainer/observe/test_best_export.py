"""hf/best follows the evaluations."""

import shutil
from pathlib import Path

import pytest

from polyreme_trainer.observe.best_export import BestExport, best_version


def export(folder: Path, version: int) -> Path:
    path = folder / f"iteration-{version:06d}"
    (path / "ema").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "ema/model.safetensors"):
        (path / name).write_text(f"{name} of {version}")
    return path


def test_the_best_of_equal_versions_is_the_oldest() -> None:
    assert best_version({0: 0.5, 8: 0.9, 16: 0.9}) == 8
    assert best_version({}) is None


def test_it_is_the_best_among_the_exports_and_outlives_its_own(tmp_path: Path) -> None:
    best = BestExport(tmp_path)
    best.update({0: 0.1})
    assert best.version() is None  # the export does not exist yet
    export(tmp_path, 0)
    first = export(tmp_path, 8)
    best.update({0: 0.1, 4: 0.9, 8: 0.7})  # version 4 was not saved
    assert best.version() == 8
    assert (tmp_path / "best" / "model.safetensors").samefile(first / "model.safetensors")
    shutil.rmtree(first)
    export(tmp_path, 16)
    best.update({0: 0.1, 8: 0.7, 16: 0.6})
    assert best.version() == 8
    assert (tmp_path / "best" / "ema" / "model.safetensors").read_text() == "ema/model.safetensors of 8"
    export(tmp_path, 24)
    best.update({0: 0.1, 8: 0.7, 16: 0.6, 24: 0.8})
    assert best.version() == 24
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best",
        "iteration-000000",
        "iteration-000016",
        "iteration-000024",
    ]


def test_a_version_with_a_result_of_another_metric_makes_way(tmp_path: Path) -> None:
    export(tmp_path, 8)
    best = BestExport(tmp_path)
    best.update({8: 0.9})
    best.update({16: 0.1})
    assert best.version() == 8  # version 16 is not saved
    export(tmp_path, 16)
    best.update({16: 0.1})
    assert best.version() == 16


def test_an_interrupted_exchange_is_repeated(tmp_path: Path) -> None:
    export(tmp_path, 8)
    (tmp_path / ".best-partial").mkdir()
    (tmp_path / ".best-old").mkdir()
    BestExport(tmp_path).update({8: 0.5})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "iteration-000008"]


def test_an_export_that_cannot_be_linked_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    export(tmp_path, 8)
    monkeypatch.setattr("polyreme_trainer.observe.best_export.os.link", refuse)
    BestExport(tmp_path).update({8: 0.5})
    assert BestExport(tmp_path).version() is None
    assert "version 8" in caplog.text
