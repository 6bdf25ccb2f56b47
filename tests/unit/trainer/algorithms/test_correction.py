"""Every correction compared with loops over Python numbers; equal policies; the metrics."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from polyreme.config.recipes.recipe import Correction, GeometricMask, IcePop, SequenceTis, TokenTis, Veto
from polyreme_trainer.algorithms.correction import correct
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.metrics import combine, finish
from support.token_batches import loss_inputs

SIZES = [4, 1, 3, 6, 0, 2]
CORRECTIONS: dict[str, Correction] = {
    "token": TokenTis(cap=1.2),
    "sequence": SequenceTis(cap=1.1),
    "icepop": IcePop(low=0.8, high=1.3),
    "geometric": GeometricMask(low=0.9, high=1.1),
    "veto": Veto(low=0.7),
    "veto both ways": Veto(low=0.6, high=1.5),
}


def naive(correction: Correction, logs: list[float], size: int) -> list[float]:
    """Factors of one sequence with these log w."""
    w = [math.exp(x) for x in logs]
    if isinstance(correction, TokenTis):
        return [min(x, correction.cap) for x in w]
    if isinstance(correction, SequenceTis):
        return [min(math.prod(w), correction.cap)] * size
    if isinstance(correction, IcePop):
        return [x if correction.low <= x <= correction.high else 0.0 for x in w]
    if isinstance(correction, GeometricMask):
        mean = math.prod(w) ** (1 / size) if size else 1.0
        return [float(correction.low <= mean <= correction.high)] * size
    low, high = correction.low, correction.high or math.inf
    return [float(all(low <= x <= high for x in w))] * size


def expected(correction: Correction, inputs: LossInputs) -> list[float]:
    logs = (inputs.old - inputs.behaviour).tolist()
    result: list[float] = []
    for size in SIZES:
        result += naive(correction, logs[len(result) : len(result) + size], size)
    return result


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", CORRECTIONS)
def test_factors(name: str, seed: int) -> None:
    inputs = loss_inputs(seed, SIZES)
    factor, _ = correct([CORRECTIONS[name]], inputs)
    np.testing.assert_allclose(factor, expected(CORRECTIONS[name], inputs), rtol=1e-9)
    assert not factor.requires_grad


def test_factors_of_a_list_are_multiplied() -> None:
    inputs, parts = loss_inputs(1, SIZES), [CORRECTIONS["token"], CORRECTIONS["geometric"], CORRECTIONS["veto"]]
    found, _ = correct(parts, inputs)
    np.testing.assert_allclose(found, np.prod([expected(part, inputs) for part in parts], axis=0), rtol=1e-9)


@pytest.mark.parametrize("corrections", [[], list(CORRECTIONS.values()), [TokenTis(cap=1.0)]])
def test_equal_policies_need_no_correction(corrections: list[Correction]) -> None:
    inputs = loss_inputs(2, SIZES)
    inputs = replace(inputs, behaviour=inputs.old, fresh=torch.ones(len(inputs.old), dtype=torch.bool))
    factor, metrics = correct(corrections, inputs)
    assert (factor == 1).all()
    values = finish(combine([metrics]))
    ones = {"importance_weight", "importance_weight_max", "correction_factor"} & values.keys()
    assert all(values[name] == 1 for name in ones) and all(values[name] == 0 for name in values.keys() - ones)


def test_metrics_are_those_of_the_whole() -> None:
    inputs = loss_inputs(3, SIZES)
    fresh = torch.arange(len(inputs.old)) % 3 == 0
    inputs = replace(inputs, fresh=fresh)
    corrections = [CORRECTIONS["token"], CORRECTIONS["geometric"]]
    factor, metrics = correct(corrections, inputs)
    found = finish(combine([metrics]))
    w = [math.exp(x) for x in (inputs.old - inputs.behaviour).tolist()]
    k3 = [x - 1 - math.log(x) for x in w]
    dropped = [all(f == 0 for f in factor[inputs.sequence == i].tolist()) for i, size in enumerate(SIZES) if size]
    assert 0 < sum(dropped) < len(dropped)
    assert found == pytest.approx(
        {
            "importance_weight": sum(w) / len(w),
            "importance_weight_max": max(w),
            "off_policy_kl": sum(k3) / len(k3),
            "mismatch_kl": sum(x for x, f in zip(k3, fresh, strict=True) if f) / int(fresh.sum()),
            "correction_factor": sum(factor.tolist()) / len(w),
            "truncated_fraction": sum(x > 1.2 for x in w) / len(w),
            "dropped_token_fraction": sum(f == 0 for f in factor.tolist()) / len(w),
            "dropped_sequence_fraction": sum(dropped) / len(dropped),
        },
        rel=1e-6,
    )


def test_far_off_policies_stay_finite() -> None:
    inputs = loss_inputs(0, [2, 2])
    inputs = replace(inputs, old=torch.zeros(4), behaviour=torch.tensor([-500.0, 500.0, -500.0, -500.0]))
    for correction in CORRECTIONS.values():
        factor, metrics = correct([correction], inputs)
        assert torch.isfinite(factor).all()
        assert all(math.isfinite(value) for value in finish(combine([metrics])).values())
