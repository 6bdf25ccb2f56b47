"""Two turns; the reward of each is its share of sevens."""

from typing import Any


class Turns:
    def reset(self, row: dict[str, Any]) -> None:
        self.turns = 0

    def step(self, message: str) -> tuple[str | None, float, bool]:
        self.turns += 1
        done = self.turns == 2
        return None if done else "again", message.count("7") / max(len(message), 1), done
