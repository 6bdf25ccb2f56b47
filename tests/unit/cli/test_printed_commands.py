"""Commands that are printed for a user to copy have each path as one word of a shell."""

import shlex
from pathlib import Path

from polyreme.cli.commands.init import next_steps


def test_the_commands_after_init_can_be_copied() -> None:
    folder = Path("my first run/größe")
    words = [shlex.split(line.removeprefix("next"), comments=True) for line in next_steps(folder, environment=True)]
    assert words == [
        ["polyreme", *command, str(folder / "run.yaml")] for command in (["config", "check"], ["environment", "test"], ["up"])
    ]
