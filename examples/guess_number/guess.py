"""Guess a number: the environment answers each guess with `higher` or `lower`."""


class GuessNumber:
    """Guess a number from 1 to 9."""

    def reset(self, row, seed):
        self.secret = int(row["answer"])
        return None  # the row's own prompt

    def step(self, message):
        guess = message.rpartition(": ")[2]  # what stands before it are the policy's own notes
        if guess not in tuple("123456789"):
            return "number", 0.0, False
        if int(guess) == self.secret:
            return None, 1.0, True
        return "higher" if int(guess) < self.secret else "lower", 0.0, False
