"""Files that commands write: a path that cannot be written is one error, before anything is done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polyreme.cli.main import build_app
from polyreme.cli.new_run.files import Answers, write_new_run
from polyreme.errors import ConfigError
from polyreme.process.lifecycle import exit_on_error


@pytest.mark.parametrize(
    "words", [["import-config", "file", "--output"], ["upgrade-config", "file", "--output"], ["doctor", "--report"]]
)
@pytest.mark.parametrize("path", ["none/file.yaml", "file/file.yaml", "file"])
def test_an_output_that_cannot_be_written_is_an_error(words: list[str], path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("name: letters\n")
    words = [str(tmp_path / word) if word == "file" else word for word in words]
    result = CliRunner().invoke(build_app(words[:1]), [*words, str(tmp_path / path)])
    assert isinstance(result.exception, ConfigError)
    assert words[-1] in f"{result.exception.expected} {result.exception.do}"


def test_a_device_is_no_report(tmp_path: Path) -> None:
    """A rename would replace it."""
    result = CliRunner().invoke(build_app(["report"]), ["report", str(tmp_path), "--out", "/dev/null"])
    assert isinstance(result.exception, ConfigError) and "--out" in result.exception.expected
    assert Path("/dev/null").is_char_device()


def test_a_new_run_in_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="FOLDER"):
        write_new_run(tmp_path / "file" / "letters", Answers("letters"))


def test_a_path_that_is_too_long_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), exit_on_error("polyreme"):
        Path("x" * 300).stat()
    assert "too long" in capsys.readouterr().err


def test_a_file_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    code = "from pathlib import Path; from polyreme.rundir.run_records import write_atomically;"
    code += r"write_atomically(Path('file'), '\u8cea \xe4')"
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=ascii_only, check=True)
    assert (tmp_path / "file").read_bytes() == "質 ä".encode()
