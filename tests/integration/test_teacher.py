"""A real replica as the teacher of the policy that it serves. At the same version all advantages are zero."""

import uuid
from pathlib import Path

import numpy as np
import pytest

from polyreme.config.data import DataConfig
from polyreme.config.recipes.presets import PRESETS
from polyreme.config.teacher import TeacherConfig
from polyreme.errors import ConfigError
from polyreme.experience.records import GroupRecord, SampleRecord
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.data.template import Template
from polyreme_trainer.megatron.batches.samples import collect
from polyreme_trainer.orchestrator.scoring.teacher_client import TeacherClient
from support.models import tiny_model
from support.replicas import Learner, Replica, generate, hf_weights, model_files, replica, request, rollout_config

pytestmark = pytest.mark.real

PROMPT = [7, 12, 30, 9]
LENGTH = 20


async def test_a_teacher_that_is_the_student_gives_advantages_of_zero(redis_url: str, tmp_path: Path) -> None:
    """Samples come from gRPC and teacher log-probabilities from /v1, by prompt_logprobs and by echo. For other tokens they equal
    transformers'."""
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    model = tiny_model("untied", tmp_path / "model", hidden_size=128)
    template = Template(model_files(model), DataConfig(train=tmp_path / "unused", template="none"))
    async with replica(redis_url, run_id, model, tmp_path / "replica.log", rollout_config(model)) as there:
        learner = Learner.of(run_id, model)
        try:
            await learner.push(there.weights, 0, hf_weights(model))
            sequences = [(index, [], LENGTH, index) for index in range(4)]
            answers = await generate(there.rollout, request(run_id, PROMPT, sequences, temperature=1.0))
            for protocol in ("prompt_logprobs", "echo"):
                teacher = client(there, protocol=protocol)
                try:
                    await teacher.check(template, len(PROMPT) + LENGTH)
                    judged = [await teacher.logprobs(PROMPT, answer.ids) for answer in answers.values()]
                    samples = [
                        SampleRecord(
                            token_ids=np.array(answer.ids, np.int32),
                            logprobs=np.array(answer.logprobs, np.float32),
                            loss_mask=np.ones(len(answer.ids), np.uint8),
                            finish_reason=2,
                            spans=[(0, 0, len(answer.ids))],
                            score=0.0,
                            teacher_logprobs=logprobs,
                        )
                        for answer, logprobs in zip(answers.values(), judged, strict=True)
                    ]
                    batch = collect([GroupRecord(0, 1, np.array(PROMPT, np.int32), samples)])[1]
                    found = Algorithm(PRESETS["distillation"], LENGTH).advantages(batch)
                    assert batch.lengths.tolist() == [LENGTH] * 4
                    np.testing.assert_allclose(found.advantages, 0, atol=1e-4)
                    total, count = found.metrics["teacher_kl"]
                    assert count == 4 * LENGTH and abs(total) < 1e-4 * count
                    assert np.abs(batch.behaviour[batch.trained]).mean() > 0.1  # not a comparison of zeros
                    other = [(each + 1) % 40 for each in answers[0].ids]
                    expected = by_transformers(model, PROMPT, other)
                    np.testing.assert_allclose(await teacher.logprobs(PROMPT, other), expected, atol=1e-3)
                    with pytest.raises(ConfigError) as caught:
                        await teacher.check(template, 10_000)
                    assert "max_model_len" in caught.value.found
                finally:
                    await teacher.close()
            stranger = client(there, model="stranger")
            with pytest.raises(ConfigError) as caught:
                await stranger.check(template, 24)
            assert "replica-test" in caught.value.found
            await stranger.close()
        finally:
            learner.arena.close()


def by_transformers(model: Path, prompt: list[int], response: list[int]) -> np.ndarray:
    import torch
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[*prompt, *response]])
    with torch.no_grad():
        rows = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(ids).logits[0].log_softmax(-1)
    return rows[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0].numpy()


def client(there: Replica, **fields: str) -> TeacherClient:
    url = f"http://{there.lease.http_address}/v1/"
    return TeacherClient(there.run, TeacherConfig.model_validate({"url": url, "outage_timeout": 60.0, **fields}))
