"""The pages for users of other systems: the test imports their files as documented, and runs their rewards."""

import json
from pathlib import Path

import pytest
import yaml

from polyreme.cli.main import build_app
from polyreme.config.load import load_config
from polyreme.import_config.systems import SYSTEMS
from polyreme_reward.items import Item
from polyreme_reward.plugins.load import load
from support import guide
from support.command_lines import simple_commands

PAGES = [f"from-{name}.md" for name in SYSTEMS]


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    guide.write_files(request.param, tmp_path)
    monkeypatch.chdir(tmp_path)
    return str(request.param)


def test_the_import_writes_what_the_page_shows(page: str) -> None:
    [script] = guide.commands(page)
    [[program, *words]] = simple_commands(script)
    assert program == "polyreme"
    build_app(words)(args=words, standalone_mode=False)
    written = Path("run.yaml").read_text()
    part = Path("part.yaml")
    assert not part.exists() or set(part.read_text().splitlines()) <= set(written.splitlines())
    assert load_config(Path("run.yaml")).iterations > 1
    assert yaml.safe_load(written)


def test_the_reward_scores_as_in_its_system(page: str) -> None:
    file = Path("my_rewards.py")
    if not file.exists():
        assert page == "from-mindspeed.md"
        return
    loaded = load({"path": str(file), "code": file.read_text(), "options": {}})
    items = [
        Item("", "What is 2+3?", response, label="5", metadata_json=json.dumps({"data_source": "sums"}))
        for response in ("5", "4")
    ]
    assert [loaded.unwrap(loaded.call(item)) for item in items] == [1.0, 0.0]


def test_mini_batches_of_openrlhf(tmp_path: Path) -> None:
    """The mini-batches that the page of OpenRLHF states in a sentence."""
    guide.write_files("from-openrlhf.md", tmp_path)
    words = ["import-config", str(tmp_path / "openrlhf.sh"), "--output", str(tmp_path / "run.yaml")]
    build_app(words)(args=words, standalone_mode=False)
    assert load_config(tmp_path / "run.yaml").algorithm.minibatches == 2
