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

KEY = "tml-the key of the service"


@pytest.fixture
def parts(redis_url: str, run_id: str, tmp_path: Path) -> Iterator[tuple[Parts, str, int]]:
    """The parts, not started, the API's URL, and the page's port. Those that run at the end have to end well."""
    write_tiny_model(tmp_path / "model")
    sampler = {"engine": "transformers", "max_model_len": 64}
    learner = {"parallel": {"data": 2}}
    tree = {"name": run_id, "base_model": "tiny", "model": {"path": "model"}, "sampler": sampler, "learner": learner}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(tree))
    port, page = free_port(), free_port()
    python, file = [sys.executable, "-m", "polyreme"], [str(tmp_path / "serve.yaml"), f"output_dir={tmp_path / 'out'}"]
    access = ["host=0.0.0.0", f"port={port}", f"page_port={page}", "security.token_env=SERVE_KEY"]
    commands = {part: [*python, "serve", f"--part={part}", *file, *access] for part in ("api", "learner", "observer")}
    commands["sampler"] = [*python, "sampler", *file]
    found = Parts(commands, tmp_path, {"SERVE_KEY": KEY, "POLYREME_REDIS": redis_url})
    yield found, f"http://127.0.0.1:{port}", page
    assert set(found.end().values()) == {0}


async def answered(url: str, **headers: str) -> httpx.Response:
    """The first answer of the API."""
    async with asyncio.timeout(300), httpx.AsyncClient(trust_env=False, headers=headers) as http:
        while True:
            try:
                return await http.get(url)
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


async def test_the_api_takes_those_with_the_key_and_probes(parts: tuple[Parts, str, int]) -> None:
    running, url, page = parts
    running.start("api")
    for path in ("ready", "health", "api/v1/healthz"):
        assert (await answered(f"{url}/{path}")).status_code == 200
    served = f"{url}/api/v1/get_server_capabilities"
    wrong: tuple[dict[str, str], ...] = ({}, {"x-api-key": "tml-another"}, {"authorization": "Bearer"})
    for headers in wrong:
        refused = await answered(served, **headers)
        assert refused.status_code == 401 and refused.json()["category"] == "user"
    assert (await answered(served, **{"x-api-key": KEY})).json()["supported_models"][0]["model_name"] == "tiny"
    assert "another process that uses it" in await asyncio.to_thread(running.refusal, "api")
    running.start("observer")
    assert "polyreme_" in (await answered(f"http://127.0.0.1:{page}/metrics/")).text
    running.kill("api")
    running.start("api")
    assert (await answered(f"{url}/ready")).status_code == 200


@pytest.mark.real
async def test_parts_restart_alone_and_clients_go_on(parts: tuple[Parts, str, int], tmp_path: Path) -> None:
    """The learner's part has two ranks, which end with it."""
    running, url, _ = parts
    for part in ("sampler", "learner", "observer", "api"):  # in any order
        running.start(part)
    await answered(f"{url}/ready")
    program = client(url, KEY, "continued", tmp_path)
    for line, part in (("2 ", "learner"), ("9 ", "api")):
        await program.wait_for(line)
        running.kill(part)
        running.start(part)
    outcome = await asyncio.to_thread(program.result)
    assert len(outcome["losses"]) == 25 and np.isfinite(outcome["losses"]).all()
    assert outcome["losses"][-1] < outcome["losses"][0]
    [saved] = (tmp_path / "out").glob(f"*/models/{outcome['end'].removeprefix('tinker://')}")
    assert (saved / "adapter_model.safetensors").exists()
