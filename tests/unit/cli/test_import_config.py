"""`polyreme import-config` as a command."""

from pathlib import Path

import pytest

from polyreme.cli.import_config import import_config
from polyreme.config.load import load_config
from polyreme.errors import ConfigError

FILE = Path(__file__).parents[1] / "import_config" / "files" / "verl_grpo.sh"


def test_the_written_file_loads_and_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "run.yaml"
    import_config(FILE, target, rows=7473)
    assert load_config(target).iterations == 105
    assert "CHECK" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="one is there"):
        import_config(FILE, target)
    import_config(FILE, rows=7473)
    assert capsys.readouterr().out == target.read_text()


def test_an_unknown_system(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="paddlenlp"):
        import_config(FILE, tmp_path / "run.yaml", "unheard-of")
