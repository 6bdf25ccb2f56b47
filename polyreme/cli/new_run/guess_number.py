"""An environment: the policy guesses a number, and the environment answers `higher` or `lower`. Change it into yours."""


class GuessNumber:
    """Guess a number. Each episode has an instance of its own."""

    def reset(self, row: dict[str, str]) -> str | None:
        """Begins an episode with a row of the data. With a parameter `seed` it gets an integer for random numbers, too.

        Returns:
            The first message of the user; None: the row's own prompt.
        """
        self.secret = int(row["answer"])
        return None

    def step(self, message: str) -> tuple[str | None, float, bool]:
        """Answers the policy's message: returns the next message of the user, the reward, and whether the episode is over."""
        guess = message.strip()
        if not guess.isdecimal():
            return "Answer with a number.", 0.0, False
        if int(guess) == self.secret:
            return None, 1.0, True
        return "higher" if int(guess) < self.secret else "lower", 0.0, False
