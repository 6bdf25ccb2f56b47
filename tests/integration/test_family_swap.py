"""Pushed weights of the families whose layers vLLM packs differently: its workers hold them, and its answers equal those of
transformers."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from polyreme.weights.delta import diff
from polyreme.weights.manifest import Manifest
from polyreme_trainer.weight_sync.replica_client import ReplicaClient
from polyreme_trainer.weight_sync.version import Version
from support.engine_digests import PROMPT
from support.models import tiny_family_model
from support.replicas import Learner, generate, hf_weights, is_tied, model_files, replica, request, rollout_config
from support.worker_weights import digest, rank_weights

pytestmark = pytest.mark.real

TESTS = Path(__file__).resolve().parents[1]
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 96,
}  # vLLM's kernels on CPU require multiples of 32

WIDE_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 96},  # 48: the kernel pads it
    "qwen3_moe": {"moe_intermediate_size": 64},
    "glm4_moe": {"moe_intermediate_size": 64, "tie_word_embeddings": False},
    "olmoe": {"tie_word_embeddings": False},  # vLLM's OLMoE has a separate head; the published models are untied
}


@pytest.mark.parametrize(
    "model_type",
    [
        "gemma3_text",
        "qwen2_moe",
        pytest.param("glm4_moe", marks=pytest.mark.slow),
        pytest.param("llama", marks=pytest.mark.slow),  # with a bias in every linear layer
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("olmoe", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
    ],
)
def test_the_workers_hold_and_use_the_pushed_tensors(model_type: str, tmp_path: Path) -> None:
    """Pushes two versions: the second one shows whether a reload keeps anything of the first."""
    sizes = WIDE | WIDE_EXPERTS.get(model_type, {})
    model = tiny_family_model(model_type, tmp_path / "model", **sizes)
    (files := tmp_path / "files").mkdir()
    for name, data in model_files(model).items():
        (files / name).write_bytes(data)
    learner = Learner.of(f"test-{uuid.uuid4().hex[:12]}", model)
    try:
        pushed = [tiny_family_model(model_type, tmp_path / f"version-{seed}", seed, **sizes) for seed in (1, 2)]
        stagings = []
        for version, directory in enumerate(pushed):
            stagings.append(tmp_path / f"{version}.pb")
            stagings[-1].write_bytes(learner.write(version, hf_weights(directory)).SerializeToString())
        command = [sys.executable, "-m", "support.engine_digests", str(files), "1", *map(str, stagings)]
        environment = os.environ | {"PYTHONPATH": str(TESTS)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        answers = json.loads(done.stdout.splitlines()[-1])
    finally:
        learner.arena.close()
    names = set(hf_weights(model))
    assert len({tuple(answer["ids"]) for answer in answers}) == 2, "the versions could not be distinguished"
    for directory, answer in zip(pushed, answers, strict=True):
        assert set(answer["names"]) == names
        (held,) = answer["workers"]
        expected = rank_weights(hf_weights(directory), is_tied(model), 0, 1)
        assert {name: (tuple(shape), value) for name, (shape, value) in held.items()} == {
            name: digest(array) for name, array in expected.items()
        }
        ids, logprobs = greedy(directory, len(answer["ids"]))
        assert answer["ids"] == ids
        assert answer["logprobs"] == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.slow
async def test_a_delta_of_nothing_but_expert_biases_sends_tokens_to_other_experts(redis_url: str, tmp_path: Path) -> None:
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    model = tiny_family_model("glm4_moe", tmp_path / "model", **WIDE | WIDE_EXPERTS["glm4_moe"])
    shutil.copytree(model, tmp_path / "updated")
    weights = hf_weights(model)
    biases = {name: -bias for name, bias in weights.items() if name.endswith("e_score_correction_bias")}
    assert len(biases) == 3
    save_file(weights | biases, tmp_path / "updated" / "model.safetensors", metadata={"format": "pt"})
    async with replica(redis_url, run_id, model, tmp_path / "replica.log", rollout_config(model)) as there:
        learner = Learner.of(run_id, model)
        link = ReplicaClient(there.lease, learner.arena)
        try:
            first, second = (learner.write(version, each) for version, each in enumerate((weights, weights | biases)))
            versions = [Version(each.manifest, each.slot, each.generation) for each in (first, second)]
            old, new = (Manifest.from_proto(each.manifest) for each in (first, second))
            delta = diff(old, learner.arena.slot_view(first.slot), new, learner.arena.slot_view(second.slot))
            assert delta is not None
            await link.stream(versions[0])
            for directory in (model, tmp_path / "updated"):
                await link.commit(versions.pop(0))
                answer = (await generate(there.rollout, request(run_id, PROMPT, [(0, [], 32, 0)])))[0]
                ids, logprobs = greedy(directory, 32)
                assert answer.ids == ids
                assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
                if versions:
                    assert (await link.stream_delta(delta)).nbytes < 4096
                    before = logprobs
            assert logprobs != pytest.approx(before, abs=1e-2)
        finally:
            await link.close()
            learner.arena.close()


def greedy(model: Path, tokens: int) -> tuple[list[int], list[float]]:
    """transformers' ids after the prompt, and the log-probability of each."""
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids, logprobs = list(PROMPT), []
    with torch.no_grad():
        for _ in range(tokens):
            row = reference(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row[ids[-1]]))
    return ids[len(PROMPT) :], logprobs
