"""Comparisons pass equal results and fail different ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from polyreme.errors import GateError
from polyreme.experience.metric_records import GateMeasured
from polyreme_trainer.learner.gates import IGNORE, LIMITS, Answer, stack
from polyreme_trainer.megatron.probes import comparison
from support.models import tiny_model

LIMIT = LIMITS["float32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return comparison.load_hf(tiny_model("untied", tmp_path_factory.mktemp("gates") / "model"), "float32")


def greedy(model: torch.nn.Module, prompt: list[int], length: int = 6) -> Answer:
    """The model's greedy answer, token by token, with its log-probabilities."""
    ids, logprobs = list(prompt), []
    for _ in range(length):
        distribution = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(distribution.argmax()))
        logprobs.append(float(distribution.max()))
    return Answer(np.array(prompt), np.array(ids[len(prompt) :]), np.array(logprobs, dtype=np.float32))


def test_logits_gate(model: torch.nn.Module) -> None:
    ids = comparison.probe_ids(50, 16, seed=3)
    assert ids.tolist() == comparison.probe_ids(50, 16, seed=3).tolist()
    logits = model(input_ids=ids).logits
    comparison.logits_gate(logits, model, ids, LIMIT).check()
    logits[2, 7, 11] += 0.01
    with pytest.raises(GateError, match=r"found 0\.0(1|0999)"):
        comparison.logits_gate(logits, model, ids, LIMIT).check()


def test_greedy_gate_sees_one_wrong_token(model: torch.nn.Module) -> None:
    answers = [greedy(model, [5, 6, 7, 8]), greedy(model, [9, 10])]
    assert comparison.greedy_gate(model, answers, LIMIT).value == 0
    answers[1].response[3] = (answers[1].response[3] + 1) % 50
    with pytest.raises(GateError):
        comparison.greedy_gate(model, answers, LIMIT).check()


def test_greedy_gate_keeps_no_logits_but_those_of_an_answer(model: torch.nn.Module) -> None:
    """With a real vocabulary they take a megabyte per token."""
    sizes: list[int] = []
    hook = model.get_submodule("lm_head").register_forward_hook(
        lambda _, __, logits: sizes.append(logits.numel() // logits.shape[-1])
    )
    try:
        comparison.greedy_gate(model, [answer([5, 6, 7, 8], 6), answer([9, 10], 3)], LIMIT)
    finally:
        hook.remove()
    assert sizes == [6, 3]


def answer(prompt: list[int], length: int) -> Answer:
    return Answer(np.array(prompt), np.arange(length), np.zeros(length, dtype=np.float32))


def test_replica_gate_sees_another_temperature(model: torch.nn.Module) -> None:
    answers = [greedy(model, [5, 6, 7, 8]), greedy(model, [9, 10], 3)]
    ids, targets = map(torch.from_numpy, stack(answers))
    for temperature, agrees in ((1.0, True), (0.9, False)):
        distribution = (model(input_ids=ids).logits / temperature).log_softmax(-1)
        ours = distribution.gather(2, targets.clamp(min=0)[..., None])[..., 0][targets != IGNORE]
        gate = comparison.replica_gate(ours, answers, LIMIT)
        assert (gate.value <= gate.limit) is agrees
    assert gate.record() == GateMeasured(name=gate.name, value=gate.value, limit=gate.limit)


def test_a_model_of_other_weights_fails_the_gate(model: torch.nn.Module, tmp_path: Path) -> None:
    other = comparison.load_hf(tiny_model("untied", tmp_path / "other", seed=1), "float32")
    with pytest.raises(GateError):
        comparison.greedy_gate(other, [greedy(model, [5, 6, 7, 8])], LIMIT).check()


def test_a_critic_of_another_head_fails_its_gate(tmp_path: Path) -> None:
    language_model = tiny_model("untied", tmp_path / "model")
    critic = AutoModelForSequenceClassification.from_pretrained(language_model, num_labels=1)
    critic.save_pretrained(tmp_path / "critic")
    loaded, ids = comparison.load_hf_critic(tmp_path / "critic", "float32"), comparison.probe_ids(50, 8, 0)
    with torch.no_grad():  # transformers' own logits are those of the last position
        values = torch.stack([critic(ids[:, : t + 1]).logits[:, 0] for t in range(8)], dim=1)
    comparison.values_gate(values, loaded, ids, LIMIT).check()
    with pytest.raises(GateError):
        comparison.values_gate(values + 1, loaded, ids, LIMIT).check()
