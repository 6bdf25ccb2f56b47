"""The processes of a training service, each on its own as compose and Kubernetes start them."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from polyreme.hub.tiny_model import write_tiny_model
from polyreme.net.ports import free_port
from support.service import Parts, client

pytestmark = pytest.mark.real
KEY = "tml-the key of the service"


@pytest.fixture
def parts(redis_url: str, tmp_path: Path) -> Iterator[tuple[Parts, str]]:
    """The parts, not started, and the API's URL."""
    write_tiny_model(tmp_path / "model")
    sampler = {"engine": "transformers", "max_model_len": 64}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump({"base_model": "tiny", "model": {"path": "model"}, "sampler": sampler}))
    port = free_port()
    python, file = [sys.executable, "-m", "polyreme"], [str(tmp_path / "serve.yaml"), f"output_dir={tmp_path / 'out'}"]
    access = ["host=0.0.0.0", f"port={port}", "security.token_env=SERVE_KEY"]
    commands = {part: [*python, "serve", f"--part={part}", *file, *access] for part in ("api", "learner")}
    commands["sampler"] = [*python, "sampler", *file]
    found = Parts(commands, tmp_path, {"SERVE_KEY": KEY, "POLYREME_REDIS": redis_url})
    yield found, f"http://127.0.0.1:{port}"
    assert found.end() == {"api": 0, "learner": 0, "sampler": 0}


async def answers(http: httpx.AsyncClient, path: str) -> httpx.Response:
    """The first answer of the API."""
    async with asyncio.timeout(300):
        while True:
            try:
                return await http.get(path)
            except httpx.TransportError:
                await asyncio.sleep(0.1)


async def test_parts_restart_alone_and_take_clients_with_the_key(parts: tuple[Parts, str], tmp_path: Path) -> None:
    running, url = parts
    for part in ("sampler", "learner", "api"):  # in any order
        running.start(part)
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        for path in ("/ready", "/health", "/api/v1/healthz"):
            assert (await answers(http, path)).status_code == 200
        for headers in ({}, {"x-api-key": "tml-another"}, {"authorization": "Bearer"}):
            refused = await http.get("/api/v1/get_server_capabilities", headers=headers)
            assert refused.status_code == 401 and refused.json()["category"] == "user"
        allowed = await http.get("/api/v1/get_server_capabilities", headers={"x-api-key": KEY})
        assert allowed.json()["supported_models"][0]["model_name"] == "tiny"
    assert "another process that uses it" in await asyncio.to_thread(running.refusal, "learner")
    program = client(url, KEY, "continued", tmp_path)
    for line, part in (("2 ", "learner"), ("9 ", "api")):
        await program.wait_for(line)
        running.kill(part)
        running.start(part)
    outcome = await asyncio.to_thread(program.result)
    assert len(outcome["losses"]) == 25 and np.isfinite(outcome["losses"]).all()
    assert outcome["losses"][-1] < outcome["losses"][0]
    saved = tmp_path / "out" / "serve" / "models" / outcome["end"].removeprefix("tinker://")
    assert (saved / "adapter_model.safetensors").exists()
