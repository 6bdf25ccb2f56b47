"""Every objective of a stage compared with loops over Python numbers: value, gradient and metrics, on ragged rows, for any split of a
step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from polyreme.config.stage import Dpo, Ipo, Kto, OrPo, PreferenceLoss, SimPo
from polyreme_trainer.algorithms import preference
from polyreme_trainer.algorithms.metrics import combine, finish
from polyreme_trainer.algorithms.objective import Objective, StageInputs
from polyreme_trainer.algorithms.objectives import CrossEntropy, LabelledLogprobs, PairwiseLogprobs, PairwiseScores

BASELINE = 0.35


@dataclass(frozen=True)
class Answer:
    """One answer: log-probabilities of its tokens under policy and reference."""

    logprobs: list[float]
    reference: list[float]


def logsigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def ratio(answer: Answer) -> float:
    return sum(answer.logprobs) - sum(answer.reference)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def odds(answer: Answer) -> float:
    p = math.exp(mean(answer.logprobs))
    return math.log(p / (1 - p))


Row = dict[str, float]
Formula = Callable[[Sequence[Answer], Row], float]


def cdpo(row: Sequence[Answer], _: Row) -> float:
    h = 0.3 * (ratio(row[0]) - ratio(row[1]))
    return -0.9 * logsigmoid(h) - 0.1 * logsigmoid(-h)


def ipo_mean(row: Sequence[Answer], _: Row) -> float:
    h = ratio(row[0]) / len(row[0].logprobs) - ratio(row[1]) / len(row[1].logprobs)
    return (h - 1 / (2 * 0.3)) ** 2


def kto(row: Sequence[Answer], columns: Row) -> float:
    if columns["good"]:
        return 1.5 * (1 - 1 / (1 + math.exp(-0.3 * (ratio(row[0]) - BASELINE))))
    return 0.7 * (1 - 1 / (1 + math.exp(-0.3 * (BASELINE - ratio(row[0])))))


def bradley_terry(row: Sequence[Answer], columns: Row) -> float:
    chosen, rejected = (answer.logprobs[0] for answer in row)
    centre = 0.05 * (chosen + rejected) ** 2
    if columns["tie"]:
        return -0.5 * logsigmoid(chosen - rejected) - 0.5 * logsigmoid(rejected - chosen) + centre
    return -logsigmoid(chosen - rejected - columns["margin"]) + centre


CASES: dict[str, tuple[Objective, Formula]] = {
    "dpo": (PairwiseLogprobs(Dpo(beta=0.3)), lambda row, _: -logsigmoid(0.3 * (ratio(row[0]) - ratio(row[1])))),
    "cdpo": (PairwiseLogprobs(Dpo(beta=0.3, label_smoothing=0.1)), cdpo),
    "ipo": (PairwiseLogprobs(Ipo(beta=0.3)), ipo_mean),
    "ipo of sums": (
        PairwiseLogprobs(Ipo(beta=0.3, per_token=False)),
        lambda row, _: (ratio(row[0]) - ratio(row[1]) - 1 / 0.6) ** 2,
    ),
    "simpo": (
        PairwiseLogprobs(SimPo(beta=2.0, gamma=0.5)),
        lambda row, _: -logsigmoid(2.0 * (mean(row[0].logprobs) - mean(row[1].logprobs)) - 0.5),
    ),
    "orpo": (
        PairwiseLogprobs(OrPo(beta=0.2)),
        lambda row, _: -mean(row[0].logprobs) - 0.2 * logsigmoid(odds(row[0]) - odds(row[1])),
    ),
    "kto": (LabelledLogprobs(Kto(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)), kto),
    "reward model": (PairwiseScores(center_coef=0.05), bradley_terry),
}


def made_up(name: str, rows: int = 6) -> tuple[list[list[Answer]], list[Row]]:
    """Rows of answers of 1 to 6 tokens; with a value head each answer has one number, its score."""
    random = np.random.default_rng(len(name))
    width = 1 if name == "kto" else 2
    result, columns = [], []
    for row in range(rows):
        answers = []
        for _ in range(width):
            length = 1 if name == "reward model" else int(random.integers(1, 7))
            answers.append(Answer((-random.random(length) * 2).tolist(), (-random.random(length) * 2).tolist()))
        result.append(answers)
        columns.append({"good": float(row % 2), "tie": float(row == 1), "margin": 0.3 * row})
    return result, columns


def inputs_of(rows: Sequence[Sequence[Answer]], columns: Sequence[Row], output: torch.Tensor, step_rows: int) -> StageInputs:
    answers = [answer for row in rows for answer in row]
    return StageInputs(
        output=output,
        sequence=torch.tensor([place for place, answer in enumerate(answers) for _ in answer.logprobs]),
        sequences=len(answers),
        columns={name: torch.tensor([each[name] for each in columns], dtype=torch.float64) for name in columns[0]},
        rows=step_rows,
        tokens=0,
        reference=torch.tensor([x for answer in answers for x in answer.reference], dtype=torch.float64),
        baseline=BASELINE,
    )


def flat(rows: Sequence[Sequence[Answer]]) -> list[float]:
    return [x for row in rows for answer in row for x in answer.logprobs]


@pytest.mark.parametrize("name", CASES)
def test_the_objective_is_the_mean_of_the_formula_over_the_rows(name: str) -> None:
    objective, formula = CASES[name]
    rows, columns = made_up(name)
    output = torch.tensor(flat(rows), dtype=torch.float64, requires_grad=True)
    value, metrics = objective.loss(inputs_of(rows, columns, output, len(rows)))
    expected = mean([formula(row, each) for row, each in zip(rows, columns, strict=True)])
    assert value.item() == pytest.approx(expected, rel=1e-12)
    assert finish(combine([metrics]))["loss"] == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(value, output)
    slopes, h = [], 1e-6
    for row, each in zip(rows, columns, strict=True):
        for answer in row:
            for place, x in enumerate(answer.logprobs):
                shifted = []
                for sign in (1, -1):
                    answer.logprobs[place] = x + sign * h
                    shifted.append(formula(row, each))
                answer.logprobs[place] = x
                slopes.append((shifted[0] - shifted[1]) / (2 * h) / len(rows))
    np.testing.assert_allclose(gradient.numpy(), slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cuts", [(1, 5), (2, 3, 1), (1, 1, 1, 1, 1, 1)])
def test_micro_batches_add_up_to_the_step(name: str, cuts: tuple[int, ...]) -> None:
    objective, _ = CASES[name]
    rows, columns = made_up(name)
    whole = torch.tensor(flat(rows), dtype=torch.float64, requires_grad=True)
    value, metrics = objective.loss(inputs_of(rows, columns, whole, len(rows)))
    (gradient,) = torch.autograd.grad(value, whole)
    start, total, gradients, parts = 0, 0.0, [], []
    for count in cuts:
        part = rows[start : start + count]
        output = torch.tensor(flat(part), dtype=torch.float64, requires_grad=True)
        one, measured = objective.loss(inputs_of(part, columns[start : start + count], output, len(rows)))
        gradients.append(torch.autograd.grad(one, output)[0])
        parts.append(measured)
        total, start = total + one.item(), start + count
    assert total == pytest.approx(value.item(), rel=1e-12)
    torch.testing.assert_close(torch.cat(gradients), gradient)
    assert finish(combine(parts)) == pytest.approx(finish(combine([metrics])), rel=1e-12)


def test_cross_entropy_is_the_mean_over_the_tokens_of_the_step() -> None:
    output = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    inputs = StageInputs(output, torch.tensor([0, 0, 1]), 2, {}, rows=4, tokens=12)
    value, metrics = CrossEntropy().loss(inputs)
    assert value.item() == pytest.approx(6 / 12)
    assert finish(combine([metrics]))["loss"] == pytest.approx(2.0)
    assert torch.autograd.grad(value, output)[0].tolist() == pytest.approx([-1 / 12] * 3)


def test_accuracy_leaves_ties_out_and_counts_equal_scores_half() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, 1.0, 3.0, 3.0, 9.0, 0.0])
    columns = {"margin": torch.zeros(4), "tie": torch.tensor([0.0, 0.0, 0.0, 1.0])}
    _, metrics = PairwiseScores().loss(StageInputs(scores, torch.arange(8), 8, columns, rows=4, tokens=8))
    found = finish(combine([metrics]))
    assert found["accuracy"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert found["margin"] == pytest.approx((1 - 1 + 0) / 3)


@pytest.mark.parametrize(
    ("loss", "quantity"),
    [
        (Dpo(beta=0.3), ratio),
        (Ipo(beta=0.3), ratio),
        (Ipo(beta=0.3, per_token=False), ratio),
        (SimPo(beta=0.3), lambda answer: mean(answer.logprobs)),
        (OrPo(beta=0.3), lambda answer: mean(answer.logprobs)),
    ],
    ids=["dpo", "ipo", "ipo of sums", "simpo", "orpo"],
)
def test_the_metrics_are_those_of_the_field(loss: PreferenceLoss, quantity: Callable[[Answer], float]) -> None:
    """As in TRL, a reward is beta times the sum of the log-ratios (also where the loss takes their means), or the mean log-probability."""
    rows, columns = made_up(loss.kind)
    output = torch.tensor(flat(rows), dtype=torch.float64)
    _, metrics = PairwiseLogprobs(loss).loss(inputs_of(rows, columns, output, len(rows)))
    found = finish(combine([metrics]))
    chosen, rejected = (mean([0.3 * quantity(row[place]) for row in rows]) for place in (0, 1))
    assert found["rewards/chosen"] == pytest.approx(chosen)
    assert found["rewards/rejected"] == pytest.approx(rejected)
    assert found["rewards/margins"] == pytest.approx(chosen - rejected)
    assert found["logps/rejected"] == pytest.approx(mean([sum(row[1].logprobs) for row in rows]))
    assert found["rewards/accuracies"] == pytest.approx(mean([float(quantity(row[0]) > quantity(row[1])) for row in rows]))


def test_certain_answers_have_finite_odds() -> None:
    logprobs = torch.tensor([0.0, -1e-9, -50.0], requires_grad=True)
    value = preference.log_odds(logprobs)
    assert torch.isfinite(value).all() and torch.isfinite(torch.autograd.grad(value.sum(), logprobs)[0]).all()


def test_a_loss_with_a_reference_refuses_to_go_without() -> None:
    inputs = StageInputs(torch.zeros(2), torch.tensor([0, 1]), 2, {}, rows=1, tokens=2)
    with pytest.raises(ValueError, match="reference"):
        PairwiseLogprobs(Dpo()).loss(inputs)
