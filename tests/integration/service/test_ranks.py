"""The training service's engine on several ranks against one rank: numbers, and states that pass from one layout to another."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from polyreme.config.model import ModelConfig
from polyreme.config.serve import ServeConfig, ServeLearner, ServeSampler
from polyreme.config.trainer import LoraConfig, ParallelConfig
from polyreme.hub.tiny_model import write_tiny_model
from polyreme_trainer.service.batch import Batch, BatchResult, LossCall
from polyreme_trainer.service.engine import ServiceEngine
from polyreme_trainer.service.errors import ModelLostError
from polyreme_trainer.service.losses import SPECS
from polyreme_trainer.service.messages import AdamSettings
from support.models import tiny_family_model
from support.ranks import run_ranks

pytestmark = pytest.mark.real

ADAM = AdamSettings(learning_rate=1e-3, eps=1e-4, weight_decay=0.01, grad_clip_norm=1.0)
"""eps is large: a step must not amplify the rounding of gradients that are almost 0."""
LORAS = {
    "a": (LoraConfig(rank=3), "cross_entropy", 5),
    "b": (LoraConfig(rank=8, targets=["q_proj", "k_proj", "v_proj", "o_proj"]), "importance_sampling", 1),
    "c": (LoraConfig(rank=1, alpha=64.0, targets=["gate_proj", "up_proj", "down_proj"]), "dpo", 4),
    "v": (LoraConfig(rank=2), "value", 3),
}
"""Models of different ranks and layers, the last one a critic, with the loss and the number of sequences of each batch: one has fewer than there are data ranks."""


def batches(step: int) -> dict[str, LossCall]:
    draw, calls = np.random.default_rng(step), dict[str, LossCall]()
    for name, (_, loss, count) in LORAS.items():
        lengths = draw.integers(1, 28, count)
        inputs, targets = ([draw.integers(3, 90, length) for length in lengths] for _ in range(2))
        total = int(lengths.sum())
        columns = {column: draw.normal(0, 1, total).astype(np.float32) for column in SPECS[loss].inputs}
        columns |= {column: np.full(total, -4.5, np.float32) for column in columns if column.endswith("logprobs")}
        calls[name] = LossCall(Batch(inputs, targets, columns), loss, SPECS[loss].options)
    return calls


def compute(engine: ServiceEngine, calls: dict[str, LossCall]) -> list[float]:
    """The losses, and the sums of the log-probabilities or values."""
    found = engine.forward_backward(calls)
    results = [each for each in found.values() if isinstance(each, BatchResult)]
    assert len(results) == len(calls), found
    return [number for each in results for number in (each.loss, float(sum(map(np.sum, each.outputs))))]


def stepped(engine: ServiceEngine, name: str, folder: Path) -> float:
    """Takes a step and writes the adapters. Returns the gradient's norm."""
    norm, _ = engine.optim_step(name, ADAM)
    folder.mkdir()
    engine.write_sampler_weights(name, folder)
    return norm


def train(engine: ServiceEngine, folder: Path, other: Path | None) -> dict[str, list[float]]:
    """What a client does. `folder` gets the states; `other` has those of another layout."""
    made = folder if engine.ranks.leads else folder / str(engine.ranks.rank)
    made.mkdir(parents=True, exist_ok=True)
    for number, (name, (lora, loss, _)) in enumerate(LORAS.items()):
        engine.create(name, lora, number, critic=loss == "value")
    numbers = []
    for step in range(3):
        for part in range(2):
            numbers += compute(engine, batches(2 * step + part))
        numbers += [engine.optim_step(name, ADAM)[0] for name in LORAS if name != "c" or step < 2]
    for name in LORAS:  # `c` has a gradient that waits for its step
        (folder / f"state-{name}").mkdir(exist_ok=True)
        engine.save(name, folder / f"state-{name}", gradient=True)
    lose_one_file(engine, folder / "state-c", folder / "state-lost")
    again = []
    for attempt in ("kept", "loaded"):
        engine.load("c", folder / "state-c", LORAS["c"][0], 2) if attempt == "loaded" else None
        again += [*compute(engine, {"c": batches(9)["c"]}), stepped(engine, "c", made / attempt)]
    for name in LORAS:
        stepped(engine, name, made / name)
    if other is not None:
        engine.load("d", other / "state-c", LORAS["c"][0], 2)
        numbers += [*compute(engine, {"d": batches(9)["c"]}), stepped(engine, "d", made / "moved")]
    return {"numbers": numbers, "again": again}


def lose_one_file(engine: ServiceEngine, state: Path, copy: Path) -> None:
    """Loads a state that lacks the file of rank 0, which every rank refuses."""
    if engine.ranks.leads:
        shutil.copytree(state, copy, ignore=shutil.ignore_patterns("state-0.*"))
    if not engine.ranks.alone:
        torch.distributed.barrier()
    with pytest.raises(ModelLostError):
        engine.load("lost", copy, LORAS["c"][0], 2)
    engine.remove("lost")


def train_whole(engine: ServiceEngine, folder: Path) -> list[float]:
    """The same for all parameters."""
    for name in list(engine.models):
        engine.remove(name)
    engine.create("whole", None, 0)
    made, numbers = folder if engine.ranks.leads else folder / str(engine.ranks.rank), list[float]()
    for step in range(2):
        numbers += [*compute(engine, {"whole": batches(step)["a"]}), *compute(engine, {"whole": batches(step)["b"]})]
        numbers += [stepped(engine, "whole", made / f"whole-{step}")]
        if step == 0:
            (folder / "state-whole").mkdir(exist_ok=True)
            engine.save("whole", folder / "state-whole", gradient=True)
            engine.load("whole", folder / "state-whole", None, 1)
    return numbers


def run_rank(base: str, layout: str, folder: str, other: str) -> None:
    """One rank of a layout."""
    with ServiceEngine.open(config(Path(base), ParallelConfig(**json.loads(layout))).as_run(), 2) as engine:
        found = train(engine, Path(folder), Path(other))
        found["whole"] = train_whole(engine, Path(folder))
        if engine.ranks.leads:
            (Path(folder) / "found.json").write_text(json.dumps(found))


def config(base: Path, parallel: ParallelConfig) -> ServeConfig:
    sampler = ServeSampler(engine="transformers", max_model_len=64)
    learner = ServeLearner(micro_batch_tokens=128, parallel=parallel)
    return ServeConfig(model=ModelConfig(path=base), sampler=sampler, learner=learner)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedding is the output layer, too, but not a critic's."""
    write_tiny_model(folder := tmp_path_factory.mktemp("ranks") / "model")
    return tiny_family_model("llama", folder, vocab_size=96)


@pytest.fixture(scope="module")
def alone(base: Path) -> Path:
    """The directory of one rank that has done the same."""
    folder = base.parent / "alone"
    with ServiceEngine.open(config(base, ParallelConfig()).as_run(), 2) as engine:
        found = train(engine, folder, None)
        found["whole"] = train_whole(engine, folder)
        (folder / "found.json").write_text(json.dumps(found))
    return folder


def close(one: Path, other: Path, file: str = "adapter_model.safetensors") -> bool:
    found, wanted = load_file(one / file), load_file(other / file)
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-5


@pytest.mark.parametrize(
    "layout", [{"tensor": 2}, {"data": 2}, {"pipeline": 2}, {"context": 2}], ids=lambda each: next(iter(each))
)
def test_two_ranks_train_as_one(layout: dict[str, int], base: Path, alone: Path, tmp_path: Path) -> None:
    """Also from a state of one rank, and one rank from theirs, with the gradient of a step that has begun."""
    run_ranks(run_rank, 2, str(base), json.dumps(layout), str(folder := tmp_path / "two"), str(alone))
    found, wanted = (json.loads((each / "found.json").read_text()) for each in (folder, alone))
    *numbers, loss, logprobs, norm = found["numbers"]
    np.testing.assert_allclose(numbers, wanted["numbers"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose([loss, logprobs, norm], wanted["again"][:3], rtol=1e-4)
    np.testing.assert_allclose(found["whole"], wanted["whole"], rtol=1e-4)
    for again in (found["again"], wanted["again"]):
        assert again[:3] == again[3:], "a state that was loaded has the same bits"
    assert all(
        torch.equal(*each)
        for each in zip(
            *(load_file(folder / name / "adapter_model.safetensors").values() for name in ("kept", "loaded")), strict=True
        )
    )
    assert close(folder / "moved", alone / "kept")
    assert all(close(folder / name, alone / name) for name in LORAS)
    assert all(close(folder / f"whole-{step}", alone / f"whole-{step}", "model.safetensors") for step in range(2))
    with ServiceEngine.open(config(base, ParallelConfig()).as_run(), 2) as engine:
        engine.load("e", folder / "state-c", LORAS["c"][0], 2)
        compute(engine, {"e": batches(9)["c"]})
        stepped(engine, "e", tmp_path / "back")
    assert close(tmp_path / "back", alone / "kept")
