"""Executes the steps of docs/gsm8k.md that need neither network nor card, on rows and a model in the published formats."""

import shutil
from pathlib import Path

import pyarrow.json
import pyarrow.parquet
import pytest

from polyreme.cli.main import build_app
from support import guide
from support.command_lines import simple_commands
from support.published import published_model

PAGE = "gsm8k.md"
RECIPE = "examples/recipes/gsm8k_0.5b.yaml"
DATA_CHECK, REWARD, FITS = guide.commands(PAGE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe with data in the published layout: two rows as Parquet, and a model directory without weights."""
    guide.write_files(PAGE, tmp_path)
    data = tmp_path / "examples" / "recipes" / "data"
    (data / "gsm8k").mkdir(parents=True)
    shutil.copy(guide.ROOT / RECIPE, tmp_path / RECIPE)
    rows = pyarrow.json.read_json(tmp_path / "rows.jsonl")
    for split in ("train", "test"):
        pyarrow.parquet.write_table(rows, data / "gsm8k" / f"{split}-00000-of-00001.parquet")
    published_model("Qwen2.5-0.5B-Instruct", data / "Qwen2.5-0.5B-Instruct")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("script", "printed"), [(DATA_CHECK, ("rows        2",)), (FITS, ("checks         passed", "12.478"))])
def test_the_checks_pass(script: str, printed: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [[_, *words]] = simple_commands(script)
    build_app(words)(args=words, standalone_mode=False)
    out = capsys.readouterr().out
    assert [text for text in printed if text not in out] == []


def test_the_reward_reads_the_published_answers(folder: Path) -> None:
    assert "mean 0.5 of 2, 0 without a score" in guide.run(REWARD, folder)
