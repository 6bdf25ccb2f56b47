"""The training service's engine in one process: all parameters instead of adapters, and models that are moved out and in."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from polyreme.config.model import ModelConfig
from polyreme.config.serve import ServeConfig, ServeLearner, ServeSampler
from polyreme.config.trainer import LoraConfig
from polyreme.hub.tiny_model import write_tiny_model
from polyreme_rollout.local.weights import tensors_of
from polyreme_trainer.service.batch import Batch
from polyreme_trainer.service.engine import ServiceEngine
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.messages import AdamSettings

pytestmark = pytest.mark.real

INPUTS, TARGETS = [np.array([5, 9, 14, 7]), np.array([11, 6])], [np.array([0, 3, 7, 8]), np.array([6, 9])]
"""Targets that are not the inputs' own next tokens."""
BATCH = Batch(INPUTS, TARGETS, {"weights": np.float32([0, 1, 1, 0.5, 1, 1])})
EPS = 1e-4
"""Large: a step must not amplify the rounding of gradients that are almost 0."""
ADAM = AdamSettings(learning_rate=1e-3, eps=EPS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "model"
    write_tiny_model(folder)
    return folder


@pytest.fixture(scope="module")
def engine(base: Path) -> Iterator[ServiceEngine]:
    sampler = ServeSampler(engine="transformers", max_model_len=64)
    config = ServeConfig(model=ModelConfig(path=base), sampler=sampler, learner=ServeLearner(micro_batch_tokens=8))
    with ServiceEngine.open(config.as_run()) as opened:
        yield opened


def steps(engine: ServiceEngine, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        losses.append(engine.forward_backward(BATCH, "cross_entropy", {})[1])
        engine.optim_step(ADAM)
    return losses


def test_all_parameters_train_as_in_plain_torch(engine: ServiceEngine, base: Path, tmp_path: Path) -> None:
    engine.create(None, 0)
    losses = steps(engine, 5)
    engine.write_sampler_weights(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(base)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=EPS)
    for loss in losses:
        adam.zero_grad()
        total, weights = torch.zeros(()), torch.from_numpy(BATCH.columns["weights"]).split([4, 2])
        for ids, targets, weight in zip(INPUTS, TARGETS, weights, strict=True):
            logprobs = model(input_ids=torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
            total = total - (weight * logprobs.gather(-1, torch.from_numpy(targets)[:, None])[:, 0]).sum()
        assert float(total.detach()) == pytest.approx(loss, rel=1e-4)
        total.backward()
        adam.step()
    with tensors_of(tmp_path) as saved:
        assert saved.keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(saved[name], tensor, rtol=0, atol=1e-5)


def test_adapters_after_a_whole_model_begin_at_the_base_model(engine: ServiceEngine) -> None:
    engine.create(LoraConfig(rank=2), 0)
    before = engine.forward(BATCH, "cross_entropy", {})[0]
    engine.create(None, 0)
    steps(engine, 2)
    whole = engine.take()
    engine.create(LoraConfig(rank=4, targets=["q_proj"]), 1)
    again = engine.forward(BATCH, "cross_entropy", {})[0]
    assert all(np.array_equal(a, b) for a, b in zip(before, again, strict=True))
    engine.put(whole)
    assert not np.array_equal(engine.forward(BATCH, "cross_entropy", {})[0][0], before[0])


def test_a_model_that_was_moved_out_goes_on_with_the_same_bits(engine: ServiceEngine) -> None:
    """Also between a gradient and its step."""
    outcomes = []
    for moves in (False, True):
        engine.create(LoraConfig(rank=3), 7)
        steps(engine, 2)
        engine.forward_backward(BATCH, "cross_entropy", {})
        if moves:
            mine = engine.take()
            engine.create(LoraConfig(rank=5, targets=["up_proj", "down_proj"]), 1)
            steps(engine, 1)
            engine.put(mine)
        outcomes.append((engine.optim_step(ADAM), engine.forward(BATCH, "cross_entropy", {})))
    (step, (logprobs, loss)), (moved_step, (moved_logprobs, moved_loss)) = outcomes
    assert (step, loss) == (moved_step, moved_loss)
    assert all(np.array_equal(a, b) for a, b in zip(logprobs, moved_logprobs, strict=True))


def test_a_gradient_that_is_not_finite_changes_nothing(engine: ServiceEngine) -> None:
    engine.create(LoraConfig(rank=2), 0)
    steps(engine, 1)
    before = engine.forward(BATCH, "cross_entropy", {})[1]
    engine.forward_backward(Batch(INPUTS, TARGETS, {"weights": np.float32([np.nan] * 6)}), "cross_entropy", {})
    with pytest.raises(TenantError, match="finite gradient"):
        engine.optim_step(ADAM)
    assert engine.forward(BATCH, "cross_entropy", {})[1] == before
    assert engine.optim_step(ADAM)[1] == 2, "a step without a gradient is one of zero"


def test_pairs_are_compared_whole(engine: ServiceEngine, base: Path) -> None:
    """Also when each pair fills a micro-batch. The gradient's norm is that of plain torch for all parameters."""
    inputs = [np.array(ids) for ids in ([5, 9, 14, 7], [5, 9, 6], [11, 6, 3], [11, 6, 8, 2, 4])]
    targets = [np.roll(ids, -1) for ids in inputs]
    count = sum(map(len, inputs))
    reference = -np.linspace(1, 3, count, dtype=np.float32)
    batch = Batch(inputs, targets, {"weights": np.ones(count, np.float32), "reference_logprobs": reference})
    engine.create(None, 0)
    loss = engine.forward_backward(batch, "dpo", {"beta": 0.5, "label_smoothing": 0.0})[1]
    norm, _ = engine.optim_step(ADAM)
    model = AutoModelForCausalLM.from_pretrained(base)
    sums, offset = [], 0
    for ids, wanted in zip(inputs, targets, strict=True):
        logprobs = model(input_ids=torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
        given = torch.from_numpy(reference[offset : offset + len(ids)])
        sums.append((logprobs.gather(-1, torch.from_numpy(wanted)[:, None])[:, 0] - given).sum())
        offset += len(ids)
    total = -sum(torch.nn.functional.logsigmoid(0.5 * (sums[i] - sums[i + 1])) for i in (0, 2))
    total.backward()
    plain = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
    assert float(total.detach()) == pytest.approx(loss, rel=1e-4)
    assert float(plain) == pytest.approx(norm, rel=1e-4)
