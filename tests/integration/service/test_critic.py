"""Critics of the training service's engine, beside policies on the same base model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from polyreme.config.model import ModelConfig
from polyreme.config.serve import ServeConfig, ServeLearner, ServeSampler
from polyreme.config.trainer import LoraConfig
from polyreme.hub.tiny_model import write_tiny_model
from polyreme_trainer.service.batch import Batch, BatchResult, LossCall
from polyreme_trainer.service.engine import ServiceEngine
from polyreme_trainer.service.losses import SPECS
from polyreme_trainer.service.messages import AdamSettings
from support.models import tiny_family_model

pytestmark = pytest.mark.real

INPUTS = [np.array([5, 9, 14, 7]), np.array([11, 6])]
RETURNS, OLD, MASK = np.float32([0, 1, -2, 3, 0.5, 1]), np.float32([0, 0.4, 0.5, -0.2, 0, 0.3]), np.float32([0, 1, 1, 1, 1, 1])
ANY = [np.zeros(4, np.int64), np.zeros(2, np.int64)]
VALUE = LossCall(Batch(INPUTS, ANY, {"returns": RETURNS, "values": OLD, "mask": MASK}), "value", {"value_clip": 0.3})
POLICY = LossCall(Batch(INPUTS, INPUTS, {"weights": MASK}), "cross_entropy", SPECS["cross_entropy"].options)
EPS = 1e-2
"""Large: a step must not amplify the rounding of gradients that are almost 0, as those of the first steps are."""
ADAM = AdamSettings(learning_rate=0.02, eps=EPS)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_tiny_model(folder := tmp_path_factory.mktemp("critic") / "model")
    return tiny_family_model("llama", folder, tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def engine(base: Path) -> Iterator[ServiceEngine]:
    sampler = ServeSampler(engine="transformers", max_model_len=64)
    config = ServeConfig(model=ModelConfig(path=base), sampler=sampler, learner=ServeLearner(micro_batch_tokens=256))
    with ServiceEngine.open(config.as_run(), 3) as opened:
        yield opened


def compute(engine: ServiceEngine, **calls: LossCall) -> dict[str, BatchResult]:
    found = engine.forward_backward(calls)
    results = {name: each for name, each in found.items() if isinstance(each, BatchResult)}
    assert len(results) == len(calls), found
    return results


def new(engine: ServiceEngine, **models: int) -> None:
    """Creates adapters of these ranks in place of all models; those whose names begin with v are critics."""
    for other in list(engine.models):
        engine.remove(other)
    for name, rank in models.items():
        engine.create(name, LoraConfig(rank=rank), rank, name.startswith("v"))


def plain(base: Path, adapter: Path) -> PeftModel:
    """The critic of an adapter's directory in transformers and PEFT."""
    classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    return PeftModel.from_pretrained(classifier, adapter, is_trainable=True).eval()


def plain_values(model: PeftModel) -> torch.Tensor:
    inner = model.base_model.model
    states = [inner.model(input_ids=torch.from_numpy(ids)[None]).last_hidden_state for ids in INPUTS]
    return torch.cat([inner.score(each)[0, :, 0] for each in states])


def test_a_critic_trains_as_in_plain_torch(engine: ServiceEngine, base: Path, tmp_path: Path) -> None:
    """Values, losses with the clip at work, norms of gradients, and the weights after each step."""
    new(engine, p=2, v=3)
    folders = [tmp_path / str(step) for step in range(5)]
    results, norms = [], []
    for folder in folders:
        folder.mkdir()
        engine.write_sampler_weights("v", folder)
        results.append(compute(engine, v=VALUE, p=POLICY)["v"])
        norms.append(engine.optim_step("v", ADAM)[0])
    assert not np.concatenate(results[0].outputs).any(), "a new critic's values are 0"
    model = plain(base, folders[0])
    trained = {name.replace(".default", ""): param for name, param in model.named_parameters() if param.requires_grad}
    adam = torch.optim.Adam(trained.values(), lr=0.02, betas=(0.9, 0.95), eps=EPS)
    returns, old, mask = map(torch.from_numpy, (RETURNS, OLD, MASK))
    clipped = 0
    for folder, result, norm in zip(folders, results, norms, strict=True):
        saved = load_file(folder / "adapter_model.safetensors")
        assert len(saved) == len(trained)
        for name, tensor in saved.items():
            param = trained[name.replace("score.weight", "score.modules_to_save.weight")]
            torch.testing.assert_close(tensor, param.detach(), rtol=0, atol=1e-5)
        adam.zero_grad()
        values = plain_values(model)
        np.testing.assert_allclose(np.concatenate(result.outputs), values.detach(), rtol=1e-4, atol=1e-5)
        near = old + (values - old).clamp(-0.3, 0.3)
        losses = torch.stack([(values - returns) ** 2, (near - returns) ** 2])
        clipped += int((mask * (losses[1] > losses[0])).sum())
        total = (mask * losses.max(dim=0).values).sum() / 2
        assert float(total.detach()) == pytest.approx(result.loss, rel=1e-4)
        total.backward()
        plain_norm = torch.stack([param.grad.norm() for param in trained.values() if param.grad is not None]).norm()
        assert float(plain_norm) == pytest.approx(norm, rel=1e-4)
        adam.step()
    assert 0 < clipped < 25


def test_critics_and_policies_have_the_bits_that_they_have_alone(engine: ServiceEngine, tmp_path: Path) -> None:
    """In passes together, and when there is no room for all of them on the device."""
    outcomes = []
    for together in (True, False):
        new(engine, v1=3, p1=4, v2=1)
        found = []
        for _ in range(3):
            calls = {"v1": VALUE, "p1": POLICY, "v2": VALUE}
            parts = [calls] if together else [{name: call} for name, call in calls.items()]
            found += [(name, each.loss) for part in parts for name, each in sorted(compute(engine, **part).items())]
            if not together:
                for number in range(engine.most):
                    engine.create(f"v other {number}", LoraConfig(rank=2), number, critic=True)
                    compute(engine, **{f"v other {number}": VALUE})
            found += [(name, engine.optim_step(name, ADAM)[0]) for name in calls]
        outcomes.append(sorted(found))
    assert outcomes[0] == outcomes[1]


def test_a_saved_critic_continues_with_the_same_bits(engine: ServiceEngine, tmp_path: Path) -> None:
    new(engine, v=3)
    compute(engine, v=VALUE)
    engine.optim_step("v", ADAM)
    compute(engine, v=VALUE)
    engine.save("v", tmp_path, gradient=True)
    kept = engine.optim_step("v", ADAM), compute(engine, v=VALUE)["v"].loss
    new(engine, p=2)
    engine.load("v", tmp_path, LoraConfig(rank=3), 1, critic=True)
    assert engine.critics == {"v"}
    assert (engine.optim_step("v", ADAM), compute(engine, v=VALUE)["v"].loss) == kept
