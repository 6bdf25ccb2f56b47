"""What ranks exchange: sums, in the types that every backend can reduce, and bytes of any length."""

import ast
from pathlib import Path

import pytest

from support import collective_checks
from support.ranks import run_ranks

MEGATRON = Path(__file__).resolve().parents[2] / "services" / "trainer" / "polyreme_trainer" / "megatron"


@pytest.mark.real
def test_float64_is_summed_where_the_backend_reduces_none() -> None:
    run_ranks(collective_checks.sum_on_a_backend_without_float64, 3, timeout=120)


@pytest.mark.real
def test_messages_of_any_length_arrive_whole() -> None:
    run_ranks(collective_checks.exchange_bytes_of_any_length, 3, timeout=120)


def test_tensors_of_other_types_than_those_of_the_model_are_summed_in_one_place() -> None:
    """Whoever calls `all_reduce` directly has a float32 or bfloat16 tensor of the model; statistics go through `sum_over`."""
    calls = {
        path.name
        for path in MEGATRON.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "all_reduce"
    }
    assert calls == {"collectives.py", "linear.py", "logprobs.py", "lora.py", "optimizer.py", "self_test.py"}
