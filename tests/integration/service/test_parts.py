"""The processes of a training service, each on its own as compose and Kubernetes start them."""

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from polyreme.hub.tiny_model import write_tiny_model
from polyreme.net.ports import free_port
from support.service import Parts, client
from support.waiting import wait_until

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
    assert {part: status for part, status in found.end().items() if status} == {}


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


def test_a_part_ends_well_before_it_has_a_redis(parts: tuple[Parts, str, int], tmp_path: Path) -> None:
    """While its command is read, and while it waits for a Redis that does not answer."""
    running, _, _ = parts
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(300)
        running.environment["POLYREME_REDIS"] = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        for part in ("api", "observer"):
            for waits in (False, True):
                process = running.start(part)
                wait_until(lambda pid=process.pid: catches_sigterm(pid))  # type: ignore[misc]
                with silent.accept()[0] if waits else nullcontext():
                    process.terminate()
                    assert process.wait(60) == 0, (tmp_path / f"{part}.log").read_text()


def catches_sigterm(pid: int) -> bool:
    """Whether a process has a handler of SIGTERM, as from when it reads its command line."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


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
