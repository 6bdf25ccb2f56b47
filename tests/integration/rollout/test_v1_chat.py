"""/v1 of real vLLM gives a conversation the tokens that it has in training."""

import asyncio
import json
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest

from polyreme.config.data import DataConfig
from polyreme.dataset.chat import read_prompt
from polyreme_trainer.data.template import Template
from support.chat_templates import ASKED, CASES, DAY, chat_model_files
from support.models import tiny_family_model
from support.policies import versions
from support.replicas import Learner, replica, rollout_config


@pytest.mark.real
async def test_a_chat_has_the_tokens_of_training(redis_url: str, tmp_path: Path) -> None:
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    files = chat_model_files("headers")
    sizes = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
    model = tiny_family_model("qwen2", tmp_path / "model", vocab_size=json.loads(files["config.json"])["vocab_size"], **sizes)
    for name, content in files.items():
        if name != "config.json":
            (model / name).write_bytes(content)
    config = rollout_config(model, max_model_len=1024)
    config = config.model_copy(update={"data": config.data.model_copy(update={"date": DAY})})
    template = Template(files, DataConfig(train=model, date=DAY))
    async with replica(redis_url, run_id, model, tmp_path / "replica.log", config) as there:
        learner = Learner.of(run_id, model)
        try:
            await learner.push(there.weights, 0, next(versions(model, 1)))
            url = f"http://{there.lease.http_address}/v1/chat/completions"
            for name, (messages, tools, *_) in CASES.items():
                body = {"messages": messages, **({} if tools is None else {"tools": tools})}
                status, told = await ask(url, body)
                assert status == 200, (name, told)
                (text,) = template.render([read_prompt(messages, name, tools)])
                assert told["prompt_token_ids"] == template.encode([text])[0].tolist(), name
            image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            status, told = await ask(url, {"messages": [ASKED, image]})
            assert status == 400 and "message 2" in told["error"]["message"]
            assert (await ask(url, {"messages": []}))[0] == 400
        finally:
            learner.arena.close()


async def ask(url: str, body: dict[str, Any]) -> tuple[int, Any]:
    asked = {"model": "replica-test", "max_tokens": 1, "temperature": 0, "return_token_ids": True, **body}

    def post() -> tuple[int, Any]:
        request = urllib.request.Request(url, json.dumps(asked).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    return await asyncio.to_thread(post)
