"""The learner's training over layouts and over a resume: the same numbers whatever the ranks, the same bits after a restart."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from polyreme.config.algorithm import AlgorithmConfig
from polyreme.config.model import ModelConfig
from polyreme.config.run import RunConfig
from polyreme.config.trainer import ParallelConfig
from polyreme.experience.records import GroupRecord
from support import learning
from support.configs import algorithm, run_config
from support.models import tiny_model
from support.ranks import run_ranks

pytestmark = pytest.mark.real

TOLERANCE = 1e-5
TOKEN_TIS = {"kind": "token_tis", "cap": 1.5}
ALGORITHMS = {
    "grpo": algorithm(loss={"high": 0.28}),
    "kl": algorithm(kl={"place": "loss", "estimator": "k3", "coef": 0.1}),
    "minibatches": algorithm(minibatches=2, epochs=2, advantage={"kind": "group_mean"}),
    "corrected": algorithm(correction=[TOKEN_TIS]),
    "corrected minibatches": algorithm(minibatches=2, correction=[TOKEN_TIS]),
    "reward kl": AlgorithmConfig.model_validate({"preset": "reinforce_pp", "kl": {"coef": 0.05}}),
    "sequence ratio": AlgorithmConfig.model_validate({"preset": "gspo", "minibatches": 2}),
}


Results = dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]


def config_of(folder: Path, model: Path, tensor: int, data: int) -> RunConfig:
    config = run_config(folder, model=ModelConfig(path=model))
    optimizer = config.trainer.optimizer.model_copy(update={"lr": learning.LR, "eps": learning.EPS})
    parallel = ParallelConfig(tensor=tensor, data=data)
    trainer = config.trainer.model_copy(update={"parallel": parallel, "micro_batch_tokens": 128, "optimizer": optimizer})
    return config.model_copy(update={"trainer": trainer})


def train_every_way(model: Path, folder: Path, tensor: int, data: int) -> Results:
    """Weights and results of each algorithm and of the warm start."""
    folder.mkdir()
    config = config_of(folder, model, tensor, data)
    sections = json.dumps({name: section.model_dump(mode="json") for name, section in ALGORITHMS.items()})
    run_ranks(learning.train_every_way, tensor * data, config.model_dump_json(), sections, str(folder))
    return {
        name: (load_file(folder / f"{name}.safetensors"), json.loads((folder / f"{name}.json").read_text()))
        for name in (*ALGORITHMS, "warm_start")
    }


@pytest.fixture(scope="module", params=["tied", "untied"])
def one_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """A model, and what one rank makes of it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_model(request.param, folder / "model")
    return model, train_every_way(model, folder / "one", 1, 1)


@pytest.mark.parametrize(("tensor", "data"), [(2, 1), (1, 2)])
def test_every_layout_gives_the_loss_and_the_weights_of_one_rank(
    one_rank: tuple[Path, Results], tensor: int, data: int, tmp_path: Path
) -> None:
    model, expected = one_rank
    found = train_every_way(model, tmp_path / "several", tensor, data)
    for name in ALGORITHMS:
        torch.testing.assert_close(found[name][0], expected[name][0], rtol=0, atol=TOLERANCE)
        for one, several in zip(expected[name][1]["trained"], found[name][1]["trained"], strict=True):
            assert measured(several) == pytest.approx(measured(one), rel=1e-4, abs=TOLERANCE)
    torch.testing.assert_close(found["warm_start"][0], expected["warm_start"][0], rtol=0, atol=TOLERANCE)
    assert found["warm_start"][1]["losses"] == pytest.approx(expected["warm_start"][1]["losses"], abs=TOLERANCE)


def measured(trained: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in trained.items() if value is not None}


@pytest.mark.parametrize(("name", "cap"), [("grpo", None), ("corrected", 1.5)])
def test_one_rank_does_what_plain_torch_does(one_rank: tuple[Path, Results], name: str, cap: float | None) -> None:
    """Every sample through transformers, the loss written out, torch's AdamW: the same two iterations."""
    path, results = one_rank
    weights, recorded = results[name]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning.LR, eps=learning.EPS, weight_decay=0.0)
    for iteration, trained in enumerate(recorded["trained"], start=1):
        loss = plain_grpo_loss(model, learning.made_up_groups(iteration, model.config.vocab_size), cap)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert trained["loss/policy"] == pytest.approx(loss.item(), abs=TOLERANCE)
        assert trained["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    expected = {name: value for name, value in model.state_dict().items() if name in weights}
    torch.testing.assert_close(weights, expected, rtol=0, atol=TOLERANCE)


def plain_grpo_loss(model: torch.nn.Module, groups: list[GroupRecord], cap: float | None) -> torch.Tensor:
    loss = torch.zeros(())
    tokens = sum(int(sample.loss_mask.sum()) for group in groups for sample in group.samples)
    for group in groups:
        scores = torch.tensor([sample.score for sample in group.samples])
        advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        for sample, advantage in zip(group.samples, advantages, strict=True):
            ids = torch.tensor([*group.prompt_ids, *sample.token_ids])[None].long()
            logprobs = F.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
            response = logprobs[len(group.prompt_ids) - 1 :]
            mask = torch.from_numpy(sample.loss_mask.copy())
            weight = torch.ones(())
            if cap is not None:
                weight = torch.exp(response.detach() - torch.from_numpy(sample.logprobs)).minimum(torch.tensor(cap))
            loss = loss - (weight * torch.exp(response - response.detach()) * advantage * mask).sum() / tokens
    return loss


@pytest.mark.parametrize(("tensor", "data"), [(2, 1), (1, 2)])
def test_a_resume_replays_to_the_same_bits(tensor: int, data: int, tmp_path: Path) -> None:
    base = config_of(tmp_path, tiny_model("tied", tmp_path / "model"), tensor, data)
    config = base.model_copy(update={"algorithm": ALGORITHMS["minibatches"]})
    for function in (learning.save_and_continue, learning.resume_and_continue):
        run_ranks(function, tensor * data, config.model_dump_json(), str(tmp_path))
    whole, resumed = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "resumed"))
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert (config.run_dir / "hf" / "iteration-000002" / "model.safetensors").is_file()


def test_ranks_outwait_a_deadline_and_share_a_failure() -> None:
    run_ranks(learning.rank_0_waits_then_fails, 2, "7")
