"""Creates everything that the example needs from a seed: a tokenizer, an untrained model, and three data sets.

The warm start teaches two ways to answer, first the second one alone, then both:
guess    47*38 -> 1512                                     a number of the right length; nearly always wrong
tool     47*38 -> calculate("47*38") -> 1786 -> 1786       asks the calculator, and repeats what it says
Most conversations guess. Reinforcement learning discovers that the calculator is right.

Invariant: the same seed gives the same files.
"""

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from calculator import OPERATIONS, Calculator  # noqa: E402
from tiny_chat import ROLES, Row, is_prepared, save, seal, write_rows  # noqa: E402

from polyreme_environment.tool_schema import tool_schema  # noqa: E402

ASKED = 0.25
"""Share of the mixture's conversations that ask the calculator."""
CALL = ['<tool_call>\n{"name": "calculate", "arguments": {"expression": "', '"}}\n</tool_call>']
WORDS = [*ROLES, *CALL, *"0123456789+-*", "calculate: Calculates.", "error"]
SOURCES = [HERE / "prepare.py", HERE / "calculator.py"]


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


def prepare(out: Path, seed: int) -> bool:
    """Writes all files under `out`. Returns False if they already exist from the same recipe."""
    if is_prepared(out, SOURCES, seed):
        return False
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "train.jsonl", tasks(random.Random(f"{seed}-tasks")), 4096)
    write_rows(out / "asked.jsonl", conversations(random.Random(f"{seed}-asked"), 1.0), 300 * 32)
    write_rows(out / "mixed.jsonl", conversations(random.Random(f"{seed}-mixed"), ASKED), 100 * 32)
    save(out / "model", WORDS, seed)
    seal(out, SOURCES, seed)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the tokenizer, model and data of the calculator.")
    parser.add_argument("--out", type=Path, default=HERE / "data")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    made = prepare(arguments.out, arguments.seed)
    print(f"{'made' if made else 'already there:'} {arguments.out}")


if __name__ == "__main__":
    main()
