"""`polyreme import-config` as a command."""

from pathlib import Path

import pytest

from polyreme.cli.commands.import_config import import_config
from polyreme.config.load import load_config
from polyreme.errors import ConfigError

FILE = Path(__file__).parents[2] / "import_config" / "files" / "verl_grpo.sh"


def test_the_written_file_loads_and_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "run.yaml"
    import_config(FILE, target, rows=7473)
    assert load_config(target).iterations == 105
    assert "CHECK" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="one is there"):
        import_config(FILE, target)
    import_config(FILE, rows=7473)
    assert capsys.readouterr().out == target.read_text()


@pytest.mark.parametrize("written", [True, False])
def test_what_is_lost_is_on_the_terminal_and_at_the_top(
    written: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "verl.yaml", tmp_path / "run.yaml" if written else None
    rollout = "{n: 4, top_p: 0.5, multi_turn: {enable: true}}"
    source.write_text(f"algorithm: {{adv_estimator: grpo}}\nactor_rollout_ref: {{rollout: {rollout}}}\n")
    import_config(source, target)
    shown = capsys.readouterr()
    listed = [line for line in shown.err.splitlines() if line.startswith("- ")]
    assert "multi_turn.enable" in listed[0] and "top_p: 0.5" in listed[1]
    assert [line.removeprefix("# ") for line in (target.read_text() if target else shown.out).splitlines()[2:4]] == listed[:2]


def test_an_import_that_is_refused_writes_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "verl.yaml", tmp_path / "run.yaml"
    source.write_text("algorithm: {adv_estimator: gpg}\nactor_rollout_ref: {rollout: {n: 4}}\n")
    with pytest.raises(ConfigError, match="gpg"):
        import_config(source, target)
    assert not target.exists()


def test_an_unknown_system(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="paddlenlp"):
        import_config(FILE, tmp_path / "run.yaml", "unheard-of")
