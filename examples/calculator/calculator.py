"""Sums and products, and a calculator for them. The right answer is worth 1, however the policy got it."""

import operator
import re

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EXPRESSION = re.compile(r"(\d{1,9})([-+*])(\d{1,9})")


class Calculator:
    """Answers questions such as 47*38, with a calculator at hand."""

    tools = ("calculate",)

    def reset(self, row, seed):
        self.answer = row["answer"]
        return None  # the row's own prompt

    def calculate(self, expression: str) -> int:
        """Calculates.

        Args:
            expression: two whole numbers with +, - or * between them
        """
        match = EXPRESSION.fullmatch(expression)
        if match is None:
            raise ValueError("expected two whole numbers with +, - or * between them")
        return OPERATIONS[match[2]](int(match[1]), int(match[3]))

    def step(self, message):
        return None, float(message == self.answer), True
