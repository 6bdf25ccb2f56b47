"""Creates everything that the example needs from a seed: a tokenizer, an untrained model, and three data sets.

The warm start teaches two ways to answer, first the second one alone, then both:
guess    47*38 -> 1512                                     a number of the right length; nearly always wrong
tool     47*38 -> calculate("47*38") -> 1786 -> 1786       asks the calculator, and repeats what it says
Most conversations guess. Reinforcement learning discovers that the calculator is right.

Invariant: the same seed gives the same files.
"""

import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from calculator import OPERATIONS, Calculator  # noqa: E402
from tiny_chat import ROLES, Row, main  # noqa: E402

from polyreme_environment.tool_schema import tool_schema  # noqa: E402

ASKED = 0.25
"""Share of the mixture's conversations that ask the calculator."""
CALL = ['<tool_call>\n{"name": "calculate", "arguments": {"expression": "', '"}}\n</tool_call>']
WORDS = [*ROLES, *CALL, *"0123456789+-*", "calculate: Calculates.", "error"]


def expression(rng: random.Random) -> str:
    """Draws two numbers of two digits, and what to do with them."""
    return f"{rng.randint(10, 99)}{rng.choice([*OPERATIONS])}{rng.randint(10, 99)}"


def tasks(rng: random.Random) -> Iterator[Row]:
    """Yields questions with their answers, endlessly."""
    while True:
        question = expression(rng)
        yield {"prompt": question, "answer": str(Calculator().calculate(question))}


def conversations(rng: random.Random, asked: float) -> Iterator[Row]:
    """Yields conversations, endlessly. `asked`: the share of those that ask the calculator."""
    tools = [tool_schema(Calculator.calculate, "calculate", "calculator.py")]
    while True:
        question = expression(rng)
        answer = str(Calculator().calculate(question))
        messages = [{"role": "user", "content": question}]
        if rng.random() < asked:
            call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": question}}}
            messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": answer}]
        else:
            answer = "".join(rng.choice("123456789") for _ in answer.strip("-"))
        yield {"messages": [*messages, {"role": "assistant", "content": answer}], "tools": tools}


DATA = {
    "tasks": (tasks, 4096),
    "asked": (partial(conversations, asked=1.0), 300 * 32),
    "mixed": (partial(conversations, asked=ASKED), 100 * 32),
}

if __name__ == "__main__":
    main(HERE, ["prepare.py", "calculator.py"], WORDS, DATA)
