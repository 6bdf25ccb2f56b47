"""How the transformers engine draws tokens. The engine itself passes the checks of every engine (tests/contract)."""

import math
from dataclasses import replace

import pytest

from polyreme_rollout.engine.protocol import EngineRequest, Sampling

torch = pytest.importorskip("torch")
from polyreme_rollout.engine.cohort import sample, uniform  # noqa: E402

WHOLE = Sampling(1.0, 1.0, -1, ())
PROBABILITIES = (0.5, 0.25, 0.2, 0.05)


def request(seed: int, sampling: Sampling = WHOLE) -> EngineRequest:
    return EngineRequest(str(seed), [1], 8, seed, "", sampling)


def draw(sampling: Sampling, seeds: int) -> tuple[list[int], list[float]]:
    """One token for each seed from `PROBABILITIES`."""
    logits = torch.tensor(PROBABILITIES).log().repeat(seeds, 1)
    return sample(logits, [request(seed, sampling) for seed in range(seeds)], [0] * seeds)


def test_tokens_follow_the_distribution() -> None:
    ids, logprobs = draw(WHOLE, 20_000)
    for token, probability in enumerate(PROBABILITIES):
        assert ids.count(token) / len(ids) == pytest.approx(probability, abs=0.015)
    assert logprobs == pytest.approx([math.log(PROBABILITIES[id]) for id in ids], abs=1e-6)


def test_a_temperature_changes_the_distribution_and_its_logprobs() -> None:
    ids, logprobs = draw(replace(WHOLE, temperature=0.5), 20_000)
    squares = [probability**2 for probability in PROBABILITIES]
    expected = [square / sum(squares) for square in squares]
    assert ids.count(0) / len(ids) == pytest.approx(expected[0], abs=0.015)
    assert logprobs == pytest.approx([math.log(expected[id]) for id in ids], abs=1e-5)


def test_temperature_zero_takes_the_most_likely_token() -> None:
    ids, logprobs = draw(replace(WHOLE, temperature=0.0), 10)
    assert ids == [0] * 10
    assert logprobs == pytest.approx([math.log(0.5)] * 10, abs=1e-6)


def test_the_least_temperature_is_that_of_vllm() -> None:
    assert draw(replace(WHOLE, temperature=1e-40), 10) == draw(replace(WHOLE, temperature=0.01), 10)


@pytest.mark.parametrize(("sampling", "left"), [(replace(WHOLE, top_k=2), 2), (replace(WHOLE, top_p=0.9), 3)])
def test_tokens_outside_top_k_and_top_p_are_never_drawn(sampling: Sampling, left: int) -> None:
    ids, logprobs = draw(sampling, 5_000)
    assert set(ids) == set(range(left))
    total = sum(PROBABILITIES[:left])
    assert logprobs == pytest.approx([math.log(PROBABILITIES[id] / total) for id in ids], abs=1e-5)


def test_rows_do_not_change_each_other() -> None:
    logits = torch.randn(8, 50, generator=torch.Generator().manual_seed(1))
    together = sample(logits, [request(seed) for seed in range(8)], list(range(8)))
    alone = [sample(logits[row : row + 1], [request(row)], [row]) for row in range(8)]
    assert together[0] == [ids[0] for ids, _ in alone]


def test_draws_of_neighbouring_seeds_and_places_differ() -> None:
    draws = {uniform(seed, place) for seed in range(50) for place in range(50)}
    assert len(draws) == 2500
    assert all(0 < number < 1 for number in draws)
