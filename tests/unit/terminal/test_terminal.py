"""What a command prints cannot command the terminal."""

import io

from polyreme.terminal.terminal import TerminalConsole


def test_texts_of_others_command_nothing() -> None:
    console = TerminalConsole(output := io.StringIO())
    console.print("a\x1b[2J\x9b1A \u202ecba\u2066 \u200d\u3000ä|\r\n", soft_wrap=True)
    assert output.getvalue() == "a\\x1b[2J\\x9b1A \\u202ecba\\u2066 \u200d\u3000ä|\n\n"
