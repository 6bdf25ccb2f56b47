"""Progress bars of long work."""

import io
from contextlib import redirect_stderr

import pytest

from polyreme.terminal.progress_bar import bar, counted, waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [40, 80])
def test_a_terminal_shows_a_bar_of_its_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = Terminal()
    with redirect_stderr(shown):
        assert list(counted(range(1000), "read[ing]", 1000)) == list(range(1000))
    drawn = shown.getvalue()
    assert "read[ing]" in drawn and "100%" in drawn and "-:--:--" in drawn


def test_without_a_terminal_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with bar("reading", 10) as count:
        for _ in range(10):
            count(1)
    assert capsys.readouterr() == ("", "")
    with waiting("loading a model"):
        pass
    assert capsys.readouterr() == ("", "loading a model ...\n")


def test_a_wait_of_unknown_length_shows_its_time_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = Terminal()
    with redirect_stderr(shown), waiting("loading [a] model"):
        pass
    assert "loading [a] model 0:00:0" in shown.getvalue() and shown.getvalue().endswith("\x1b[2K")
