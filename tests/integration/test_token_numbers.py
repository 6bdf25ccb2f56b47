"""Numbers per token through a whole run without a model: from a reward and from a teacher, over the log, to the run directory."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from polyreme.config.data import DataConfig
from polyreme.experience.ledger import ExperienceLog
from polyreme_trainer.data.template import Template
from support.raw_http import raw_server, reply
from support.simulated_run import simulated_run
from support.tiny_tokenizer import model_files

STEPS = """
def reward(token_ids, token_texts, response_raw):
    assert "".join(token_texts) == response_raw
    return [0.25 * (each % 3) for each in token_ids]
"""


def samples(folder: Path, iteration: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"run/samples/iteration_{iteration:04d}.jsonl").read_text().splitlines()]


async def test_rewards_of_tokens_reach_the_log(redis_url: str, run_id: str, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    reward = {"rewards": [{"file": str(tmp_path / "steps.py"), "weight": 2.0}, {"name": "length"}]}
    async with simulated_run(redis_url, run_id, tmp_path, iterations=2, reward=reward) as started:
        assert await started.ended(300) == ("done", ""), started.logs()
    for line in samples(tmp_path, 1) + samples(tmp_path, 2):
        assert len(line["token_rewards"]) == line["tokens"]
        assert set(line["token_rewards"]) <= {0.0, 0.5, 1.0}
        assert sum(line["token_rewards"]) == pytest.approx(line["parts"]["steps"]["weighted"])
        assert line["score"] == pytest.approx(sum(line["token_rewards"]) + line["parts"]["length"]["weighted"])


async def test_a_run_without_rewards_learns_from_its_teacher_alone(redis_url: str, run_id: str, tmp_path: Path) -> None:
    """The teacher fails every fifth request, which never becomes a number. There is no reward service."""
    template = Template(model_files(), DataConfig(train=tmp_path / "unused"))
    asked: list[list[int]] = []

    async def teacher(body: bytes, writer: asyncio.StreamWriter) -> None:
        if not body:
            writer.write(reply(b'{"data": [{"id": "large", "max_model_len": 4096}]}'))
            return
        ids = json.loads(body)["prompt"]
        asked.append(ids)
        if len(asked) % 5 == 0:
            writer.write(reply(b"", "503 Busy", "retry-after: 0\r\n"))
            return
        texts = template.decode([[each] for each in ids], special=True)
        rows = [{str(each): {"logprob": -each / 64, "decoded_token": text}} for each, text in zip(ids, texts, strict=True)]
        writer.write(reply(json.dumps({"choices": [{"prompt_logprobs": [None, *rows[1:]]}]}).encode()))

    async with raw_server(teacher) as server:
        sections = {"reward": None, "algorithm": {"preset": "distillation"}, "teacher": {"url": f"{server.url}v1"}}
        async with simulated_run(redis_url, run_id, tmp_path, iterations=2, **sections) as started:
            assert await started.ended(300) == ("done", ""), started.logs()
            audit = await ExperienceLog(started.run).audit()
            assert audit.clean
            assert not (tmp_path / "reward.log").exists()
    lines = samples(tmp_path, 1) + samples(tmp_path, 2)
    assert len(lines) == 2 * 4 * 3
    for line in lines:
        assert len(line["teacher_logprobs"]) == line["tokens"] and line["parts"].keys() == {"teacher"}
        assert line["score"] == line["parts"]["teacher"]["raw"]
        judged = [round(-64 * number) for number in line["teacher_logprobs"]]
        assert any(ids[-len(judged) :] == judged for ids in asked)
