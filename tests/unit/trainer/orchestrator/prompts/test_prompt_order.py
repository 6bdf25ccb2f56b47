"""The order of prompts and the seeds: permutations that never change."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_trainer.orchestrator.prompts import prompt_order
from polyreme_trainer.orchestrator.prompts.prompt_order import PromptOrder, pass_order, sequence_seed


@given(st.integers(-(2**63), 2**63), st.integers(0, 100), st.integers(1, 300))
def test_each_pass_visits_every_row_once(seed: int, number: int, size: int) -> None:
    order = PromptOrder(seed, [size])
    rows = [order.row_of(number * size + position) for position in range(size)]
    assert sorted(rows) == list(range(size))
    assert rows == pass_order(seed, number, size).tolist()


def test_passes_and_seeds_differ() -> None:
    orders = {tuple(pass_order(seed, number, 50)) for seed in range(5) for number in range(5)}
    assert len(orders) == 25


def test_positions_are_spread() -> None:
    """Row 0 is uniformly distributed: its mean position over 400 passes is within 4 standard errors of the middle."""
    positions = [pass_order(7, number, 101).tolist().index(0) for number in range(400)]
    assert abs(sum(positions) / 400 - 50) < 4 * 29.2 / 20


def test_the_order_of_existing_runs_stays() -> None:
    assert pass_order(0, 0, 8).tolist() == PINNED_ORDER
    assert sequence_seed(0, 1, 2, 3, 4) == PINNED_SEED


def test_seeds_are_distinct_and_fit_a_signed_word() -> None:
    seeds = {sequence_seed(1, g, a, s, p) for g in range(8) for a in range(3) for s in range(8) for p in (0, 1, 17)}
    assert len(seeds) == 8 * 3 * 8 * 3 and max(seeds) < 2**63
    assert sequence_seed(-1, 0, 0, 0, 0) != sequence_seed(1, 0, 0, 0, 0)


PINNED_ORDER = [7, 2, 5, 1, 0, 4, 3, 6]
PINNED_SEED = 2434754648190216957


@given(st.integers(0, 2**40), st.lists(st.integers(1, 40), min_size=1, max_size=4), st.booleans())
def test_without_weights_sources_are_one_data_set(seed: int, sizes: list[int], shuffled: bool) -> None:
    order = PromptOrder(seed, sizes, shuffled=shuffled)
    total = sum(sizes)
    one = PromptOrder(seed, [total])
    expected = [one.row_of(index) if shuffled else index % total for index in range(2 * total)]
    assert [order.row_of(index) for index in range(2 * total)] == expected


@given(st.integers(0, 2**40), st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 4])), min_size=2, max_size=3))
def test_a_weighted_source_has_its_share_and_uses_all_its_rows(seed: int, parts: list[tuple[int, int]]) -> None:
    sizes, weights = zip(*parts, strict=True)
    order, total = PromptOrder(seed, sizes, weights), sum(sizes)
    drawn = [order.row_of(index) for index in range(12 * total)]
    for size, end, weight in zip(sizes, accumulate(sizes), weights, strict=True):
        own = [row for row in drawn if end - size <= row < end]
        assert abs(len(own) - len(drawn) * weight / sum(weights)) <= 12 * len(parts)  # each pass rounds to whole places
        assert len(own) < 2 * size or set(own) == set(range(end - size, end))


def test_a_share_of_a_large_source_reaches_all_its_rows_over_several_passes() -> None:
    order = PromptOrder(3, [10, 90], [0.5, 0.5])
    first, second = ([order.row_of(index) for index in range(start, start + 100)] for start in (0, 100))
    assert [sum(row < 10 for row in rows) for rows in (first, second)] == [50, 50]
    assert {row for row in first + second if row >= 10} == set(range(10, 100))
    assert first != second


def test_many_sources_are_shuffled_once_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled: list[tuple[int, int, int]] = []

    def counted(seed: int, number: int, size: int) -> np.ndarray:
        shuffled.append((seed, number, size))
        return pass_order(seed, number, size)

    monkeypatch.setattr(prompt_order, "pass_order", counted)
    order = PromptOrder(0, [20] * 30, [1.0] * 30)
    rows = [order.row_of(index) for index in range(600)]
    assert sorted(rows) == list(range(600))
    assert len(shuffled) == len(set(shuffled)) == 31  # the run's order, and that of each source
