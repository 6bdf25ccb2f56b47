"""The program in a response."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_reward.rules.fences import blocks, program_of
from support.judged import fences


@pytest.mark.parametrize(("response", "program"), [pytest.param(*row[:2], id=row[2]) for row in fences.ROWS])
def test_the_program_of_a_response(response: str, program: str) -> None:
    assert program_of(response).strip() == program


def test_the_table_is_large_and_has_no_row_twice() -> None:
    assert len({row[0] for row in fences.ROWS}) == len(fences.ROWS) >= 40


@given(st.text(alphabet="`~pyx \n>-1(", max_size=200))
def test_any_text_has_a_program(text: str) -> None:
    assert isinstance(program_of(text), str)
    assert all(len(block.text) <= len(text) for block in blocks(text))


def test_many_fences_take_linear_time() -> None:
    assert program_of("```text\n" * 20_000 + "```python\nprint(3)\n```") == "print(3)"
    assert program_of("```python\nprint(3)\n```\n" + "```text\n3\n```\n" * 20_000) == "print(3)"
    assert program_of("`" * 100_000) == ""
