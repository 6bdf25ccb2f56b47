"""The stages on learner ranks: the same numbers for any ranks, the same bits after a kill, and the exports in transformers."""

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from polyreme.config.stage import StageConfig
from polyreme.config.trainer import ParallelConfig
from polyreme_reward.items import Item
from polyreme_reward.model.classifier import Classifier
from polyreme_reward.model.reward import ModelOptions
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.template import Template
from polyreme_trainer.stages.table import TABLE
from support.ranks import run_ranks
from support.stages import prepared, run_rank, stage_config, write_data, write_model
from support.tiny_tokenizer import model_files

pytestmark = pytest.mark.real

TOLERANCE = 1e-5
SGD_LIKE = {"trainer__optimizer": {"lr": 1e-3, "eps": 1e-4}, "trainer__micro_batch_tokens": 64}
"""Epsilon of Adam. The gradient of a key bias is only rounding; with the usual epsilon, this noise would move it by the learning rate."""
KINDS: dict[str, dict[str, Any]] = {
    "sft": {"stage": "sft"},
    "reward-model": {
        "stage": "reward-model",
        "ties": "half",
        "center_coef": 0.01,
        "data__margin_key": "margin",
        "data__tie_key": "tie",
    },
    "dpo": {"stage": "dpo", "loss": {"kind": "dpo", "label_smoothing": 0.1}},
    "kto": {"stage": "dpo", "loss": {"kind": "kto"}},
}


def configured(folder: Path, name: str, parallel: ParallelConfig, offload: bool = False) -> StageConfig:
    sizes = {"trainer__parallel": parallel.model_dump(), "trainer__offload": {"optimizer": offload, "idle_models": offload}}
    words = parallel.layout.replace(" ", "-")
    return stage_config(folder, **KINDS[name], **SGD_LIKE, **sizes, name=f"{name}-{words}")


def train(
    folder: Path, parallel: ParallelConfig, *names: str, dies_in: str = "", offload: bool = False
) -> dict[str, StageConfig]:
    """Trains these kinds of stages, one after the other, in a layout."""
    configs = {name: configured(folder, name, parallel, offload) for name in names}
    run_dirs = json.dumps([str(prepared(config)) for config in configs.values()])
    run_ranks(run_rank, parallel.world_size, run_dirs, dies_in)
    return configs


def weights(config: StageConfig) -> dict[str, torch.Tensor]:
    return load_file(config.run_dir / "hf" / "final" / "model.safetensors")


def records(config: StageConfig, kind: str) -> list[dict[str, Any]]:
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stages")
    write_data(path, rows=21)  # the last held-out batch has one row
    write_model(path)
    return path


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> dict[str, StageConfig]:
    """Every kind, trained by one rank."""
    return train(folder, ParallelConfig(), *KINDS)


@pytest.fixture(scope="module")
def two_tensor_ranks(folder: Path) -> dict[str, StageConfig]:
    """The same stages, trained by two tensor ranks."""
    return train(folder, ParallelConfig(tensor=2), *KINDS)


@pytest.fixture(scope="module")
def two_data_ranks(folder: Path) -> dict[str, StageConfig]:
    """The same stages, trained by two data ranks."""
    return train(folder, ParallelConfig(data=2), *KINDS)


@pytest.fixture(scope="module")
def two_stages(folder: Path) -> dict[str, StageConfig]:
    """The same stages, trained by two pipeline stages."""
    return train(folder, ParallelConfig(pipeline=2), *KINDS)


@pytest.mark.parametrize("ranks", ["two_tensor_ranks", "two_data_ranks", "two_stages"])
def test_every_layout_trains_to_the_weights_of_one_rank(
    request: pytest.FixtureRequest, one_rank: dict[str, StageConfig], ranks: str
) -> None:
    for name, config in request.getfixturevalue(ranks).items():
        torch.testing.assert_close(weights(config), weights(one_rank[name]), rtol=0, atol=TOLERANCE, msg=name)
        for kind in ("step", "eval"):
            for found, expected in zip(records(config, kind), records(one_rank[name], kind), strict=True):
                of_time = ("run", "time", "time/step", "seconds", "tokens_per_second", "kind")
                measured = {key for key in expected if key not in of_time and not key.startswith("resources/")}
                assert {key: found[key] for key in measured} == pytest.approx(
                    {key: expected[key] for key in measured}, rel=1e-3, abs=TOLERANCE
                ), name


def test_a_killed_stage_is_resumed_to_the_same_bits(
    folder: Path, two_tensor_ranks: dict[str, StageConfig], tmp_path: Path
) -> None:
    """Rank 0 is killed while it writes the second checkpoint beside the training. The interrupted run offloads."""
    for part in ("model", "rows.jsonl", "held_out.jsonl"):
        (tmp_path / part).symlink_to(folder / part)
    with pytest.raises(AssertionError):
        train(tmp_path, ParallelConfig(tensor=2), "kto", dies_in="2", offload=True)
    config = configured(tmp_path, "kto", ParallelConfig(tensor=2))
    checkpoints = config.run_dir / "checkpoints"
    assert [path.name for path in checkpoints.iterdir() if not path.name.startswith(".")] == ["step-000002"]
    assert [record["step"] for record in records(config, "step")][:4] == [1, 2, 3, 4]
    assert not (config.run_dir / "hf" / "final").exists()
    train(tmp_path, ParallelConfig(tensor=2), "kto", offload=True)
    assert [record["step"] for record in records(config, "step")] == [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in records(config, "saved")] == [2, 4, 6]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000004", "step-000006"]
    torch.testing.assert_close(weights(config), weights(two_tensor_ranks["kto"]), rtol=0, atol=0)


def rows_of(config: StageConfig) -> StageRows:
    assert config.data.eval is not None
    return TABLE[config.stage].read(config.data.eval, config, Template(model_files(), config.data), None)


def logps(model: Any, rows: StageRows) -> list[torch.Tensor]:
    """Log-probabilities of the trained tokens by transformers, one sequence at a time."""
    result = []
    for ids, mask in zip(rows.ids, rows.loss_mask, strict=True):
        tokens = torch.from_numpy(ids.astype("int64"))[None]
        with torch.no_grad():
            every = F.log_softmax(model(tokens).logits[0, :-1], -1).gather(1, tokens[0, 1:, None])[:, 0]
        result.append(every[torch.from_numpy(mask[1:].astype("bool"))])
    return result


def test_what_was_learned_is_what_transformers_computes(one_rank: dict[str, StageConfig]) -> None:
    """The held-out loss of the last evaluation, computed again from the exported models."""
    sft, dpo = one_rank["sft"], one_rank["dpo"]
    trained = AutoModelForCausalLM.from_pretrained(sft.run_dir / "hf" / "final", dtype=torch.float32)
    loss = -torch.cat(logps(trained, rows_of(sft))).mean().item()
    assert records(sft, "eval")[-1]["loss"] == pytest.approx(loss, abs=1e-4)
    assert records(sft, "eval")[-1]["loss"] < records(sft, "eval")[0]["loss"]
    policy = AutoModelForCausalLM.from_pretrained(dpo.run_dir / "hf" / "final", dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(dpo.model.path, dtype=torch.float32)
    rows = rows_of(dpo)
    ratios = [float(p.sum() - r.sum()) for p, r in zip(logps(policy, rows), logps(reference, rows), strict=True)]
    margins = [0.1 * (chosen - rejected) for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True)]
    last = records(dpo, "eval")[-1]
    assert last["rewards/margins"] == pytest.approx(sum(margins) / len(margins), abs=1e-4)
    assert last["rewards/accuracies"] == pytest.approx(sum(margin > 0 for margin in margins) / len(margins), abs=1e-6)


def test_the_baseline_of_kto_is_that_of_all_held_out_rows(one_rank: dict[str, StageConfig]) -> None:
    """Each prompt with the next row's answer, over the whole file. The losses of a batch depend on no other batch, and not on its size."""
    config = one_rank["kto"]
    policy = AutoModelForCausalLM.from_pretrained(config.run_dir / "hf" / "final", dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    rows = rows_of(config)
    assert len(rows) % config.trainer.batch_size == 1
    prompts, answers = [], []
    for ids, mask in zip(rows.ids, rows.loss_mask, strict=True):
        start = mask.tolist().index(1)
        prompts.append(ids[:start])
        answers.append(ids[start:])
    pairs = [*zip(prompts, [*answers[1:], answers[0]], strict=True)]
    others = StageRows(
        [np.concatenate(pair) for pair in pairs],
        [np.repeat([0, 1], [len(prompt), len(answer)]).astype(np.uint8) for prompt, answer in pairs],
    )
    own, mismatched = (
        [float(p.sum() - r.sum()) for p, r in zip(logps(policy, each), logps(reference, each), strict=True)]
        for each in (rows, others)
    )
    baseline = max(0.0, sum(mismatched) / len(rows))
    signs = [1 if good else -1 for good in rows.columns["good"]]
    losses = [1 - 1 / (1 + math.exp(-0.1 * s * (ratio - baseline))) for s, ratio in zip(signs, own, strict=True)]
    last = records(config, "eval")[-1]
    assert last["kl"] == pytest.approx(baseline, abs=1e-4) and baseline > 0.01
    assert last["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)


def test_answers_of_other_rows_fit_the_reference_s_context(folder: Path, tmp_path: Path) -> None:
    """A long prompt with another row's long answer is longer than each row, and the reference reads less than the model."""
    rows = [{"prompt": "1" * a, "response": "a" * (22 - a), "label": a > 10} for a in (20, 2) * 4]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "model").symlink_to(folder / "model")
    shutil.copytree(folder / "model", tmp_path / "reference")
    sizes = tmp_path / "reference" / "config.json"
    sizes.write_text(json.dumps(json.loads(sizes.read_text()) | {"max_position_embeddings": 32}))
    changes = {"data__eval": None, "data__max_tokens": 32, "reference": str(tmp_path / "reference")}
    config = stage_config(tmp_path, **KINDS["kto"], **changes)
    run_ranks(run_rank, 1, json.dumps([str(prepared(config))]), "")
    assert [record["step"] for record in records(config, "step")] == [1, 2, 3, 4, 5, 6]


def test_the_reward_service_gives_the_scores_that_were_learned(one_rank: dict[str, StageConfig]) -> None:
    """Prompt and response as text, through the exported model's own template and tokenizer."""
    config = one_rank["reward-model"]
    classifier = Classifier(str(config.run_dir / "hf" / "final"), asdict(ModelOptions(prompt_column=None)))
    assert config.data.eval is not None
    pairs = [json.loads(line) for line in config.data.eval.read_text().splitlines()]
    scores = [
        [
            classifier.score([classifier.encode(Item("", pair["prompt"], pair[key], f"{pair[key]}<eos>"))])[0].value
            for key in ("chosen", "rejected")
        ]
        for pair in pairs
        if not pair["tie"]
    ]
    last = records(config, "eval")[-1]
    assert last["accuracy"] == pytest.approx(sum(c > r for c, r in scores) / len(scores))
    assert last["margin"] == pytest.approx(sum(c - r for c, r in scores) / len(scores), abs=1e-4)
    assert last["margin"] > 0
