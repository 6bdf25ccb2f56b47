"""Executes the steps of docs/gsm8k.md that need no card, on rows and a model in the published formats, from a stand-in of the hub."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.json
import pyarrow.parquet
import pytest

from polyreme.hub.simulated_hub import SimulatedHub
from support import guide
from support.published import published_config
from support.tiny_tokenizer import model_files

CARD = b"""---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
- config_name: socratic
  data_files: [{split: train, path: socratic/train-*}]
---
"""
NO_WEIGHTS = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without a tensor."""

PAGE = "gsm8k.md"
RECIPE = "examples/recipes/gsm8k_0.5b.yaml"
DATA_CHECK, REWARD, FITS = guide.commands(PAGE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The recipe, with model and data in the published layout on a hub: two rows as Parquet, and a model without weights."""
    guide.write_files(PAGE, tmp_path)
    (tmp_path / RECIPE).parent.mkdir(parents=True)
    shutil.copy(guide.ROOT / RECIPE, tmp_path / RECIPE)
    pyarrow.parquet.write_table(pyarrow.json.read_json(tmp_path / "rows.jsonl"), rows := io.BytesIO())
    config = (published_config("Qwen2.5-0.5B-Instruct", tmp_path / "model") / "config.json").read_bytes()
    with SimulatedHub() as hub:
        hub.commit(
            "models", "Qwen/Qwen2.5-0.5B-Instruct", model_files() | {"config.json": config, "model.safetensors": NO_WEIGHTS}
        )
        splits = {f"main/{split}-00000-of-00001.parquet": rows.getvalue() for split in ("train", "test")}
        hub.commit("datasets", "openai/gsm8k", {"README.md": CARD, **splits})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        yield tmp_path


@pytest.mark.parametrize(("script", "printed"), [(DATA_CHECK, ("rows        2",)), (FITS, ("checks         passed", "12.003"))])
def test_the_checks_pass(script: str, printed: tuple[str, ...], folder: Path) -> None:
    out = guide.run(script, folder)
    assert [text for text in printed if text not in out] == []


def test_the_reward_reads_the_published_answers(folder: Path) -> None:
    assert "mean 0.5 of 2, 0 without a score" in guide.run(REWARD, folder)
