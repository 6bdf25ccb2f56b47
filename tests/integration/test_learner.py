"""The learner's training over layouts and resumes: the same numbers for any ranks, and the same bits after a restart."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from metric_rows import find
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel
from unit.docs.test_one_iteration import calls_of_a_loss

from polyreme.api.v1.experience_pb2 import FINISH_REASON_LENGTH
from polyreme.config.model import ModelConfig
from polyreme.config.recipes.algorithm import AlgorithmConfig
from polyreme.config.recipes.presets import PRESETS
from polyreme.config.run import RunConfig
from polyreme.config.trainer import CriticConfig, OffloadConfig, OptimizerConfig, ParallelConfig
from polyreme.experience.records import GroupRecord, SampleRecord
from support import learning
from support.configs import algorithm, run_config
from support.models import tiny_model
from support.ranks import run_ranks

pytestmark = pytest.mark.real

TOLERANCE = 1e-5
PPO_WITH_STATE = {
    "preset": "ppo",
    "minibatches": 2,
    "epochs": 2,
    "kl": {"adaptive": {"target": 0.5, "horizon": 100}, "renew_interval": 2},
    "shaping": {"normalise": True, "clip": [-3.0, 3.0]},
    "ptx": {"data": "unused", "coef": 0.1, "batch_size": 5},
}
"""PPO whose KL controller, running normalisation and reference have a state."""
DECAY = 0.8
PTX = {"data": "unused", "coef": 0.7, "batch_size": 7}
TEMPERATURE = 0.8
"""The sampling temperature. It is not that of supervised rows."""
TOKEN_TIS = {"kind": "token_tis", "cap": 1.5}
ALGORITHMS = {
    "grpo": algorithm(loss={"high": 0.28}),
    "kl": algorithm(kl={"place": "loss", "estimator": "k3", "coef": 0.1}),
    "minibatches": algorithm(minibatches=2, epochs=2, advantage={"kind": "group_mean"}),
    "corrected": algorithm(correction=[TOKEN_TIS]),
    "corrected minibatches": algorithm(minibatches=2, correction=[TOKEN_TIS]),
    "reward kl": AlgorithmConfig.model_validate({"preset": "reinforce_pp", "kl": {"coef": 0.05}}),
    "mixed": algorithm(ptx=PTX),
    "distilled": AlgorithmConfig.model_validate({"preset": "distillation"}),
    "sequence ratio": AlgorithmConfig.model_validate({"preset": "gspo", "minibatches": 2}),
    "ppo": AlgorithmConfig.model_validate(
        {"preset": "ppo", "advantage": {"gamma": 0.98, "bootstrap_truncated": True}, "entropy_coef": 0.01}
    ),
    "ppo from the actor": AlgorithmConfig.model_validate(PPO_WITH_STATE),
}


LAYOUTS = [ParallelConfig(tensor=2), ParallelConfig(data=2), ParallelConfig(pipeline=2)]
VIRTUAL = ParallelConfig(pipeline=2, virtual_pipeline=2)
MACHINES = ParallelConfig(pipeline=2, virtual_pipeline=2, nodes=2)
CONTEXT = ParallelConfig(context=2)

Results = dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]


def config_of(folder: Path, model: Path, parallel: ParallelConfig, critic: CriticConfig) -> RunConfig:
    config = run_config(folder, model=ModelConfig(path=model))
    optimizer = config.trainer.optimizer.model_copy(update={"lr": learning.LR, "eps": learning.EPS})
    changes = {"parallel": parallel, "micro_batch_tokens": 128, "optimizer": optimizer, "critic": critic}
    trainer = config.trainer.model_copy(update=changes)
    rollout = config.rollout.model_copy(update={"temperature": TEMPERATURE})
    return config.model_copy(update={"trainer": trainer, "rollout": rollout, "algorithm": ALGORITHMS["ppo"]})


def train_every_way(model: Path, folder: Path, parallel: ParallelConfig) -> Results:
    """Weights and results of each algorithm and of the warm start."""
    folder.mkdir()
    config = config_of(folder, model, parallel, CriticConfig(path=model.parent / "classifier"))
    sections = json.dumps({name: section.model_dump(mode="json") for name, section in ALGORITHMS.items()})
    run_ranks(learning.train_every_way, parallel.world_size, config.model_dump_json(), sections, str(folder))
    return {
        name: (load_file(folder / f"{name}.safetensors"), json.loads((folder / f"{name}.json").read_text()))
        for name in (*ALGORITHMS, "warm_start")
    }


@pytest.fixture(scope="module", params=["tied", "untied"])
def one_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    """A model, and the results of one rank."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny_model(request.param, folder / "model", layers=4)
    save_classifier(tiny_model(request.param, folder / "other", seed=1, layers=4), folder / "classifier")
    return model, train_every_way(model, folder / "one", ParallelConfig())


@pytest.mark.parametrize("parallel", LAYOUTS, ids=["tensor", "data", "pipeline"])
def test_every_layout_gives_the_loss_and_the_weights_of_one_rank(
    one_rank: tuple[Path, Results], parallel: ParallelConfig, tmp_path: Path
) -> None:
    model, expected = one_rank
    if parallel.pipeline > 1 and json.loads((model / "config.json").read_text())["tie_word_embeddings"]:
        parallel = VIRTUAL
    if parallel.data > 1 and not json.loads((model / "config.json").read_text())["tie_word_embeddings"]:
        parallel = CONTEXT
    found = train_every_way(model, tmp_path / "several", parallel)
    for name in ALGORITHMS:
        torch.testing.assert_close(found[name][0], expected[name][0], rtol=0, atol=TOLERANCE)
        for one, several in zip(expected[name][1]["trained"], found[name][1]["trained"], strict=True):
            assert measured(several) == pytest.approx(measured(one), rel=1e-4, abs=TOLERANCE)
    torch.testing.assert_close(found["warm_start"][0], expected["warm_start"][0], rtol=0, atol=TOLERANCE)
    assert found["warm_start"][1]["losses"] == pytest.approx(expected["warm_start"][1]["losses"], abs=TOLERANCE)
    (ids, logprobs), (expected_ids, expected_logprobs) = (results["warm_start"][1]["canary"] for results in (found, expected))
    assert ids == expected_ids
    assert logprobs == pytest.approx(expected_logprobs, abs=TOLERANCE)


def test_a_canary_has_the_log_probabilities_of_plain_torch(one_rank: tuple[Path, Results]) -> None:
    path, results = one_rank
    weights, measures = results["warm_start"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    ids, logprobs = measures["canary"]
    assert len(ids) == 32
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert logprobs == pytest.approx(rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), abs=1e-4)


def save_classifier(model: Path, path: Path) -> None:
    """A sequence classifier with the language model's backbone and a random head."""
    torch.manual_seed(2)
    classifier = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.float32)
    torch.nn.init.normal_(classifier.score.weight, std=0.3)
    classifier.save_pretrained(path)


def measured(trained: dict[str, float | None]) -> dict[str, float]:
    """The metrics with a value that a layout does not change."""
    return {name: value for name, value in trained.items() if value is not None and name != "padding_fraction"}


def test_the_calls_of_a_loss_are_those_of_the_documentation(tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_model("tied", tmp_path / "model"), ParallelConfig(), CriticConfig())
    config = config.model_copy(update={"algorithm": ALGORITHMS["grpo"]})
    run_ranks(learning.calls_of_a_loss, 1, config.model_dump_json(), str(tmp_path / "stacks.json"))
    assert json.loads((tmp_path / "stacks.json").read_text()) == [calls_of_a_loss()]


def test_every_preset_trains(tmp_path: Path) -> None:
    """Every preset without changes, in one process: the engine provides its inputs, and the weights move."""
    model = tiny_model("tied", tmp_path / "model")
    config = config_of(tmp_path, model, ParallelConfig(), CriticConfig())
    run_ranks(
        learning.train_every_way, 1, config.model_dump_json(), json.dumps({n: {"preset": n} for n in PRESETS}), str(tmp_path)
    )
    before = load_file(model / "model.safetensors")
    for name in PRESETS:
        after, trained = (
            load_file(tmp_path / f"{name}.safetensors"),
            json.loads((tmp_path / f"{name}.json").read_text())["trained"],
        )
        assert not torch.equal(after["model.norm.weight"], before["model.norm.weight"]), name
        assert all(math.isfinite(value) for each in trained for value in measured(each).values()), name
        assert all(each["trained_samples"] > 0 for each in trained), name
        assert [metric for each in trained for metric in each if find(metric) is None] == [], name


@pytest.mark.parametrize(("name", "cap"), [("grpo", None), ("corrected", 1.5), ("mixed", None)])
def test_one_rank_does_what_plain_torch_does(one_rank: tuple[Path, Results], name: str, cap: float | None) -> None:
    """The same two iterations with transformers, one sample at a time, an explicit loss and torch's AdamW."""
    path, results = one_rank
    weights, recorded = results[name]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning.LR, eps=learning.EPS, weight_decay=0.0)
    for iteration, trained in enumerate(recorded["trained"], start=1):
        loss = plain_grpo_loss(model, learning.made_up_groups(iteration, model.config.vocab_size), cap)
        optimizer.zero_grad()
        loss.backward()
        if name == "mixed":
            rows_loss = plain_rows_loss(model, iteration)
            (0.7 * rows_loss).backward()
            assert trained["ptx_loss"] == pytest.approx(rows_loss.item(), abs=TOLERANCE)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert trained["actor/pg_loss"] == pytest.approx(loss.item(), abs=TOLERANCE)
        assert trained["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    check_weights(weights, model)


def plain_rows_loss(model: PreTrainedModel, iteration: int) -> torch.Tensor:
    """The mean cross entropy of the response tokens of the step's 7 of 12 rows, whose order is drawn per pass."""
    rows = learning.supervised_rows(model.config.vocab_size)
    ids, masks = rows.ids, rows.loss_mask
    order = [row for number in range(2) for row in np.random.default_rng([0, 0x707478, number]).permutation(12)]
    chosen = order[7 * (iteration - 1) : 7 * iteration]
    return rows_loss(model, [ids[row] for row in chosen], [masks[row] for row in chosen])


def check_weights(weights: dict[str, torch.Tensor], model: PreTrainedModel) -> None:
    """Compares the actor's weights with those of transformers."""
    found = {name: value for name, value in weights.items() if not name.startswith("critic.")}
    expected = {name: value for name, value in model.state_dict().items() if name in found}
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def rows_loss(model: PreTrainedModel, ids: list[np.ndarray], masks: list[np.ndarray]) -> torch.Tensor:
    """The mean cross entropy of the response tokens of supervised rows, at temperature 1."""
    losses = []
    for row, mask in zip(ids, masks, strict=True):
        tokens = torch.from_numpy(row)[None].long()
        logprobs = F.log_softmax(model(tokens).logits[0, :-1], -1)
        losses += [-logprobs[t - 1, tokens[0, t]] for t in range(1, tokens.shape[1]) if mask[t]]
    return torch.stack(losses).mean()


def test_ppo_does_what_plain_torch_does(one_rank: tuple[Path, Results]) -> None:
    """The same two iterations with policy, reference and critic of transformers, one sample at a time, and an explicit GAE."""
    path, results = one_rank
    weights, recorded = results["ppo"]
    policy, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    critic = AutoModelForSequenceClassification.from_pretrained(path.parent / "classifier", dtype=torch.float32)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=learning.LR, eps=learning.EPS, weight_decay=0.0) for model in (policy, critic)
    ]
    for iteration, trained in enumerate(recorded["trained"], start=1):
        groups = learning.made_up_groups(iteration, policy.config.vocab_size)
        policy_loss, value_loss, entropy = plain_ppo_losses(policy, reference, critic, groups)
        (policy_loss - 0.01 * entropy).backward()
        value_loss.backward()
        for model, optimizer, norm in zip((policy, critic), optimizers, ("grad_norm", "critic/grad_norm"), strict=True):
            found = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            assert trained[norm] == pytest.approx(found.item(), rel=1e-4)
            optimizer.step()
            optimizer.zero_grad()
        assert trained["actor/pg_loss"] == pytest.approx(policy_loss.item(), abs=TOLERANCE)
        assert trained["actor/entropy"] == pytest.approx(entropy.item(), rel=1e-5)
        assert trained["critic/vf_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    expected = dict(policy.state_dict()) | {f"critic.{name}": value for name, value in critic.state_dict().items()}
    torch.testing.assert_close(weights, {name: expected[name] for name in weights}, rtol=0, atol=TOLERANCE)


def plain_ppo_losses(
    policy: torch.nn.Module, reference: torch.nn.Module, critic: Any, groups: list[GroupRecord]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Policy loss, value loss and entropy, each the mean over all trained tokens."""
    logprobs, entropies, values, advantages, returns = [], [], [], [], []
    for group in groups:
        for sample in group.samples:
            ids = torch.tensor([*group.prompt_ids, *sample.token_ids])[None].long()
            start = len(group.prompt_ids) - 1
            trained = [start + t for t, m in enumerate(sample.loss_mask) if m]
            if not trained:
                continue
            distribution = F.log_softmax(policy(ids).logits[0] / TEMPERATURE, -1)
            own = distribution[trained, ids[0, 1:][trained]]
            frozen = F.log_softmax(reference(ids).logits[0] / TEMPERATURE, -1)[trained, ids[0, 1:][trained]]
            every = critic.score(critic.base_model(ids).last_hidden_state)[0, :, 0]
            v = every[trained]
            rewards = [-0.02 * float(k) for k in (own - frozen).detach()]
            rewards[-1] += sample.score
            following = every[-1].item() if sample.finish_reason == FINISH_REASON_LENGTH else 0.0
            advantage, backwards = 0.0, []
            for reward, value in zip(reversed(rewards), reversed(v.tolist()), strict=True):
                advantage = reward + 0.98 * following - value + 0.98 * 0.95 * advantage
                following = value
                backwards.append(advantage)
            advantages.append(torch.tensor(backwards[::-1]))
            returns.append(advantages[-1] + v.detach())
            logprobs.append(own)
            values.append(v)
            entropies.append(-(distribution.exp() * distribution).sum(-1)[trained])
    flat = torch.cat(advantages)
    whitened = (flat - flat.mean()) / torch.sqrt(flat.var(unbiased=False) + 1e-8)
    ratio = torch.exp(torch.cat(logprobs) - torch.cat(logprobs).detach())
    return -(ratio * whitened).mean(), ((torch.cat(values) - torch.cat(returns)) ** 2).mean() / 2, torch.cat(entropies).mean()


def plain_grpo_loss(model: torch.nn.Module, groups: list[GroupRecord], cap: float | None) -> torch.Tensor:
    loss = torch.zeros(())
    tokens = sum(int(sample.loss_mask.sum()) for group in groups for sample in group.samples)
    for group in groups:
        scores = torch.tensor([sample.score for sample in group.samples])
        advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        for sample, advantage in zip(group.samples, advantages, strict=True):
            response, mask = response_logprobs(model, group, sample), torch.from_numpy(sample.loss_mask.copy())
            weight = torch.ones(())
            if cap is not None:
                weight = torch.exp(response.detach() - torch.from_numpy(sample.logprobs)).minimum(torch.tensor(cap))
            loss = loss - (weight * torch.exp(response - response.detach()) * advantage * mask).sum() / tokens
    return loss


def response_logprobs(model: torch.nn.Module, group: GroupRecord, sample: SampleRecord) -> torch.Tensor:
    """The log-probabilities of a response's tokens at the sampling temperature."""
    ids = torch.tensor([*group.prompt_ids, *sample.token_ids])[None].long()
    logprobs = F.log_softmax(model(ids).logits[0, :-1] / TEMPERATURE, -1).gather(1, ids[0, 1:, None])[:, 0]
    return logprobs[len(group.prompt_ids) - 1 :]


def test_distillation_does_what_plain_torch_does(one_rank: tuple[Path, Results]) -> None:
    """The gradient is that of the trained policy's KL to the teacher, although the sampler's log-probabilities are others."""
    path, results = one_rank
    weights, recorded = results["distilled"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning.LR, eps=learning.EPS, weight_decay=0.0)
    for iteration, trained in enumerate(recorded["trained"], start=1):
        losses, kl = [], []
        for group in learning.made_up_groups(iteration, model.config.vocab_size):
            for sample in group.samples:
                assert sample.teacher_logprobs is not None
                mask = torch.from_numpy(sample.loss_mask) > 0
                own = response_logprobs(model, group, sample)[mask]
                kl.append(own.detach() - torch.from_numpy(sample.teacher_logprobs)[mask])
                losses.append(torch.exp(own - own.detach()) * kl[-1])
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert trained["actor/teacher_kl"] == pytest.approx(torch.cat(kl).mean().item(), abs=TOLERANCE)
        assert trained["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    check_weights(weights, model)


def test_a_warm_start_does_what_plain_torch_does(one_rank: tuple[Path, Results]) -> None:
    """The cross entropy is that of the logits themselves, whatever the sampling temperature."""
    path, results = one_rank
    weights, recorded = results["warm_start"]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning.LR, eps=learning.EPS, weight_decay=0.0)
    rows = learning.supervised_rows(model.config.vocab_size)
    ids, masks = rows.ids, rows.loss_mask
    order = [row for number in range(2) for row in np.random.default_rng([0, 0, number]).permutation(len(ids))]
    for step in range(3):
        chosen = order[5 * step : 5 * step + 5]
        loss = rows_loss(model, [ids[row] for row in chosen], [masks[row] for row in chosen])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert recorded["losses"] == [pytest.approx(loss.item(), abs=TOLERANCE)]
    check_weights(weights, model)


@pytest.mark.parametrize("parallel", [*LAYOUTS[:2], MACHINES], ids=["tensor", "data", "machines"])
def test_a_resume_replays_to_the_same_bits(parallel: ParallelConfig, tmp_path: Path) -> None:
    """PPO with critic, KL controller, normalisation, moving average, renewed reference and mixed rows. The first iteration trains only the
    critic. The checkpoint is written while training continues. The run on two data ranks resumes with offload, and the export of two machines
    is gathered."""
    model = tiny_model("tied", tmp_path / "model", layers=4)
    own = OptimizerConfig(lr=3e-3, schedule="linear", warmup=2, clip_grad=0.5, eps=learning.EPS)
    base = config_of(tmp_path, model, parallel, CriticConfig(warmup_iterations=1, optimizer=own))
    actors = base.trainer.optimizer.model_copy(update={"warmup": 2})
    trainer = base.trainer.model_copy(update={"ema_decay": DECAY, "optimizer": actors})
    config = base.model_copy(update={"algorithm": ALGORITHMS["ppo from the actor"], "trainer": trainer})
    run_ranks(learning.save_and_continue, parallel.world_size, config.model_dump_json(), str(tmp_path))
    if parallel.data > 1:
        moves = config.trainer.model_copy(update={"offload": OffloadConfig(optimizer=True, idle_models=True)})
        config = config.model_copy(update={"trainer": moves})
    run_ranks(learning.resume_and_continue, parallel.world_size, config.model_dump_json(), str(tmp_path))
    whole, resumed = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "resumed"))
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    results = json.loads((tmp_path / "whole.json").read_text())
    after = json.loads((tmp_path / "resumed.json").read_text())
    assert (after["state"], after["metrics"]) == (results["state"], results["metrics"][3:])
    assert results["state"]["kl_coef"] != 0.02 and results["state"]["scores"]["count"] == 5 * 24
    assert [gate["value"] <= gate["limit"] for gate in results["gates"]] == [True, True]
    exported = config.run_dir / "hf" / "iteration-000003"
    versions = [load_file(model / "model.safetensors"), *(load_file(tmp_path / f"version-{i}.safetensors") for i in range(1, 6))]
    check_warm_up(versions[1], versions[0])
    left = [1 - done / (base.iterations - 2) for done in range(3)]
    assert [each["critic/lr"] for each in results["metrics"]] == pytest.approx([1.5e-3, 3e-3, *(3e-3 * part for part in left)])
    warm = [0.0, learning.LR / 2, learning.LR, learning.LR, learning.LR]  # the actor's schedule begins with its first step
    assert [each["actor/lr"] for each in results["metrics"]] == warm
    assert ["ptx_loss" in each for each in results["metrics"]] == [False, True, True, True, True]
    assert [each["reference/version"] for each in results["metrics"]] == [0, 0, 2, 2, 4]
    check_reference(whole, versions)
    assert all(torch.equal(tensor, versions[3][name]) for name, tensor in load_file(exported / "model.safetensors").items())
    check_average(exported, versions)
    check_exported_critic(exported)


def check_warm_up(first: dict[str, torch.Tensor], untrained: dict[str, torch.Tensor]) -> None:
    """Checks that only the critic was trained."""
    assert all(torch.equal(first[name], tensor) for name, tensor in untrained.items() if name in first)
    assert first["critic.score.weight"].abs().max() > 0


def check_reference(whole: dict[str, torch.Tensor], versions: list[dict[str, torch.Tensor]]) -> None:
    """Checks that the reference is version 4 after iteration 5."""
    for name in policy_names(versions):
        assert torch.equal(whole[f"reference.{name}"], versions[4][name])
        assert not torch.equal(whole[f"reference.{name}"], versions[5][name])


def check_average(exported: Path, versions: list[dict[str, torch.Tensor]]) -> None:
    """Compares the moving average of every iteration, and that of version 3 loaded by `transformers`, with loops in float64."""
    for name in policy_names(versions):
        expected = versions[0][name].double()
        for number, version in enumerate(versions[1:], start=1):
            expected = DECAY * expected + (1 - DECAY) * version[name].double()
            torch.testing.assert_close(version[f"ema.{name}"].double(), expected, rtol=0, atol=1e-6)
            assert number == 1 or not torch.equal(version[f"ema.{name}"], version[name])
    average = AutoModelForCausalLM.from_pretrained(exported / "ema", dtype=torch.float32).state_dict()
    for name in policy_names(versions):
        torch.testing.assert_close(average[name], versions[3][f"ema.{name}"], rtol=0, atol=0)


def check_exported_critic(exported: Path) -> None:
    critic = AutoModelForSequenceClassification.from_pretrained(exported / "critic")
    assert critic.score.weight.shape == (1, 32) and critic.score.weight.abs().max() > 0
    assert (exported / "model.safetensors").is_file()


def policy_names(versions: list[dict[str, torch.Tensor]]) -> list[str]:
    return [name for name in versions[0] if name in versions[1]]


def test_ranks_outwait_a_deadline_and_share_a_failure() -> None:
    run_ranks(learning.rank_0_waits_then_fails, 2, "7")
