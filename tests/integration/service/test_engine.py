"""The training service's engine in one process: all parameters instead of adapters, and models that are moved out and in."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from polyreme.config.model import ModelConfig
from polyreme.config.serve import ServeConfig, ServeLearner, ServeSampler
from polyreme.config.trainer import LoraConfig, ParallelConfig
from polyreme.hub.tiny_model import write_tiny_model
from polyreme_rollout.local.weights import tensors_of
from polyreme_trainer.service.batch import Batch, BatchResult, LossCall
from polyreme_trainer.service.engine import ServiceEngine
from polyreme_trainer.service.errors import ModelLostError, TenantError
from polyreme_trainer.service.losses import SPECS
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
    config = ServeConfig(
        model=ModelConfig(path=base),
        sampler=sampler,
        learner=ServeLearner(micro_batch_tokens=256, parallel=ParallelConfig(threads=2)),
    )
    with ServiceEngine.open(config.as_run(), 3) as opened:
        yield opened


def call(batch: Batch, loss: str = "cross_entropy") -> LossCall:
    return LossCall(batch, loss, SPECS[loss].options)


CALL = call(BATCH)


def compute(engine: ServiceEngine, calls: dict[str, LossCall], backward: bool = True) -> dict[str, BatchResult]:
    found = engine.forward_backward(calls) if backward else engine.forward(calls)
    assert list(found) == list(calls)
    results = {name: each for name, each in found.items() if isinstance(each, BatchResult)}
    assert len(results) == len(calls), found
    return results


def steps(engine: ServiceEngine, name: str, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        losses.append(compute(engine, {name: CALL})[name].loss)
        engine.optim_step(name, ADAM)
    return losses


def bits(engine: ServiceEngine, name: str) -> dict[str, torch.Tensor]:
    """Weights, moments, and the gradient of the next step."""
    with TemporaryDirectory() as folder:
        engine.save(name, Path(folder), gradient=True)
        return load_file(Path(folder) / "state-0.safetensors")


def new(engine: ServiceEngine, name: str, lora: LoraConfig | None, seed: int = 0) -> None:
    """Creates a model in place of all others."""
    for other in list(engine.models):
        engine.remove(other)
    engine.create(name, lora, seed)


def test_all_parameters_train_as_in_plain_torch(engine: ServiceEngine, base: Path, tmp_path: Path) -> None:
    new(engine, "whole", None)
    losses = steps(engine, "whole", 5)
    engine.write_sampler_weights("whole", tmp_path)
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


def test_adapters_after_a_whole_model_begin_at_the_base_model(engine: ServiceEngine, tmp_path: Path) -> None:
    new(engine, "first", LoraConfig(rank=2))
    before = compute(engine, {"first": CALL}, backward=False)["first"].outputs
    new(engine, "whole", None)
    steps(engine, "whole", 2)
    engine.save("whole", tmp_path, gradient=True)
    new(engine, "second", LoraConfig(rank=4, targets=["q_proj"]), 1)
    again = compute(engine, {"second": CALL}, backward=False)["second"].outputs
    assert all(np.array_equal(a, b) for a, b in zip(before, again, strict=True))
    engine.remove("second")
    engine.load("whole", tmp_path, None, 2)
    assert not np.array_equal(compute(engine, {"whole": CALL}, backward=False)["whole"].outputs[0], before[0])


def test_a_model_that_was_moved_out_goes_on_with_the_same_bits(engine: ServiceEngine) -> None:
    """Also between a gradient and its step."""
    outcomes = []
    for moves in (False, True):
        new(engine, "mine", LoraConfig(rank=3), 7)
        steps(engine, "mine", 2)
        compute(engine, {"mine": CALL})
        if moves:
            for number in range(engine.most):
                engine.create(f"other {number}", LoraConfig(rank=5, targets=["up_proj", "down_proj"]), 1)
                steps(engine, f"other {number}", 1)
        outcomes.append((engine.optim_step("mine", ADAM), bits(engine, "mine")))
    (step, kept), (moved_step, moved) = outcomes
    assert step == moved_step
    assert all(torch.equal(kept[name], moved[name]) for name in kept)


LORAS = {
    "a": LoraConfig(rank=3),
    "b": LoraConfig(rank=8, targets=["q_proj", "k_proj", "v_proj", "o_proj"]),
    "c": LoraConfig(rank=1, alpha=64.0, targets=["gate_proj", "up_proj", "down_proj"]),
}
"""Models of different ranks, layers and scales."""


def batches(step: int) -> dict[str, LossCall]:
    """A batch of other sequences for each model, and of another loss."""
    draw, calls = np.random.default_rng(step), dict[str, LossCall]()
    for (name, loss), count in zip(
        {"a": "cross_entropy", "b": "importance_sampling", "c": "ppo"}.items(), (5, 1, 3), strict=True
    ):
        lengths = draw.integers(1, 28, count)
        inputs, targets = ([draw.integers(3, 90, length) for length in lengths] for _ in range(2))
        total = int(lengths.sum())
        columns = {column: draw.normal(0, 1, total).astype(np.float32) for column in SPECS[loss].inputs}
        if "logprobs" in columns:
            columns["logprobs"] = np.full(total, -4.5, dtype=np.float32)
        calls[name] = call(Batch(inputs, targets, columns), loss)
    return calls


def trained(engine: ServiceEngine, shared: bool) -> tuple[list[dict[str, BatchResult]], dict[str, dict[str, torch.Tensor]]]:
    """Three steps of every model, with two batches each; `c` skips every second step."""
    for other in list(engine.models):
        engine.remove(other)
    for number, (name, lora) in enumerate(LORAS.items()):
        engine.create(name, lora, number)
    results = []
    for step in range(3):
        for part in range(2):
            calls = batches(2 * step + part)
            parts = [calls] if shared else [{name: each} for name, each in calls.items()]
            results.append({name: found for each in parts for name, found in compute(engine, each).items()})
        for name in "abc" if step % 2 == 0 else "ab":
            engine.optim_step(name, ADAM)
    compute(engine, {"c": batches(0)["c"]})  # a gradient that waits for its step
    return results, {name: bits(engine, name) for name in LORAS}


def test_models_that_share_passes_have_the_bits_of_separate_ones(engine: ServiceEngine) -> None:
    (shared, weights), (separate, alone) = trained(engine, True), trained(engine, False)
    for one, other in zip(shared, separate, strict=True):
        for name in LORAS:
            assert one[name].loss == other[name].loss
            assert all(np.array_equal(a, b) for a, b in zip(one[name].outputs, other[name].outputs, strict=True))
    for name in LORAS:
        assert weights[name].keys() == alone[name].keys()
        assert all(torch.equal(weights[name][each], alone[name][each]) for each in alone[name])
    assert [engine.steps(name) for name in "abc"] == [3, 3, 2]


def test_products_of_all_models_together_differ_by_rounding(engine: ServiceEngine) -> None:
    _, alone = trained(engine, False)
    engine.same_bits = False
    try:
        _, together = trained(engine, True)
    finally:
        engine.same_bits = True
    for name in LORAS:
        for each in alone[name]:
            torch.testing.assert_close(together[name][each], alone[name][each], rtol=1e-3, atol=1e-5)


def test_an_impossible_batch_leaves_the_others_of_its_pass(engine: ServiceEngine) -> None:
    new(engine, "a", LORAS["a"])
    engine.create("b", LORAS["b"], 1)
    wrong = call(Batch([np.array([5, 10**6])], [np.array([5, 6])], {"weights": np.float32([1, 1])}))
    found = engine.forward_backward({"a": wrong, "b": CALL})
    assert isinstance(found["a"], TenantError) and "token ids from 0 to" in str(found["a"])
    assert isinstance(found["b"], BatchResult)


def test_a_gradient_that_is_not_finite_changes_nothing(engine: ServiceEngine) -> None:
    new(engine, "mine", LoraConfig(rank=2))
    engine.create("other", LoraConfig(rank=2), 0)
    steps(engine, "mine", 1)
    before = compute(engine, {"mine": CALL}, backward=False)["mine"].loss
    compute(engine, {"mine": call(Batch(INPUTS, TARGETS, {"weights": np.float32([np.nan] * 6)})), "other": CALL})
    with pytest.raises(TenantError, match="finite gradient"):
        engine.optim_step("mine", ADAM)
    assert compute(engine, {"mine": CALL}, backward=False)["mine"].loss == before
    assert engine.optim_step("mine", ADAM)[1] == 2, "a step without a gradient is one of zero"
    assert np.isfinite(engine.optim_step("other", ADAM)[0]), "another model of the same pass has its own gradient"


def test_weights_that_are_not_finite_lose_the_model(engine: ServiceEngine) -> None:
    """At first, A has no gradient, and without eps its step is 0 / 0."""
    new(engine, "mine", LoraConfig(rank=2))
    compute(engine, {"mine": CALL})
    with pytest.raises(ModelLostError, match=r"finite weights after a step.*raise eps"):
        engine.optim_step("mine", AdamSettings(learning_rate=1e-3, eps=0))


def test_pairs_are_compared_whole(engine: ServiceEngine, base: Path) -> None:
    """Also when they do not fit into one micro-batch. The gradient's norm is that of plain torch for all parameters."""
    inputs = [np.array(ids) for ids in ([5, 9, 14, 7], [5, 9, 6], [11, 6, 3], [11, 6, 8, 2, 4])] * 20
    targets = [np.roll(ids, -1) for ids in inputs]
    count = sum(map(len, inputs))
    reference = -np.linspace(1, 3, count, dtype=np.float32)
    batch = Batch(inputs, targets, {"weights": np.ones(count, np.float32), "reference_logprobs": reference})
    new(engine, "whole", None)
    given = LossCall(batch, "dpo", {"beta": 0.5, "label_smoothing": 0.0})
    loss = compute(engine, {"whole": given})["whole"].loss
    norm, _ = engine.optim_step("whole", ADAM)
    model = AutoModelForCausalLM.from_pretrained(base)
    sums, offset = [], 0
    for ids, wanted in zip(inputs, targets, strict=True):
        logprobs = model(input_ids=torch.from_numpy(ids)[None]).logits[0].log_softmax(-1)
        given = torch.from_numpy(reference[offset : offset + len(ids)])
        sums.append((logprobs.gather(-1, torch.from_numpy(wanted)[:, None])[:, 0] - given).sum())
        offset += len(ids)
    total = -sum(torch.nn.functional.logsigmoid(0.5 * (sums[i] - sums[i + 1])) for i in range(0, 80, 2))
    total.backward()
    plain = torch.stack([param.grad.norm() for param in model.parameters() if param.grad is not None]).norm()
    assert float(total.detach()) == pytest.approx(loss, rel=1e-4)
    assert float(plain) == pytest.approx(norm, rel=1e-4)
