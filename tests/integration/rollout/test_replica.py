"""A replica process with real vLLM: HTTP, a gateway, the end, and errors at the start."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.gateways import gateway
from support.models import tiny_model
from support.policies import Reference, versions
from support.replicas import Learner, generate, replica, request, rollout_config

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.real
async def test_http_shows_the_live_policy_and_kill_leaves_nothing(redis_url: str, tmp_path: Path) -> None:
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    model = tiny_model("tied", tmp_path / "model", hidden_size=128, context=256)
    config = rollout_config(model, max_model_len=256)
    async with replica(redis_url, run_id, model, tmp_path / "replica.log", config) as there:
        learner = Learner.of(run_id, model)
        try:
            base = f"http://{there.lease.http_address}"
            assert [await fetch(f"{base}/{path}") for path in ("health", "ready", "v1/models")] == [200, 503, 503]
            await learner.push(there.weights, 0, next(versions(model, 1)))
            assert [await fetch(f"{base}/{path}") for path in ("health", "ready", "v1/models")] == [200, 200, 200]
            assert b"polyreme_rollout_version 0.0" in await read(f"{base}/metrics")
            asked = {"model": "replica-test", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
            told = json.loads(await read(f"{base}/v1/completions", asked | {"ignore_eos": True}))
            answer = (await generate(there.rollout, request(run_id, PROMPT, [(0, [], 12, 0)])))[0]
            assert told["choices"][0]["token_ids"] == answer.ids
            assert told["system_fingerprint"] == "policy-0"
            await http_keeps_the_replica_to_itself_and_says_what_it_can(base)
            await a_gateway_answers_as_the_replica(there)
            await http_shares_no_prefix_with_an_earlier_policy(learner, there, model)
        finally:
            learner.arena.close()
        family = psutil.Process(there.child.pid).children(recursive=True)
        assert family
        os.kill(there.child.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=300)
        assert not alive


async def http_keeps_the_replica_to_itself_and_says_what_it_can(base: str) -> None:
    [model] = json.loads(await read(f"{base}/v1/models"))["data"]
    assert (model["id"], model["root"]) == ("replica-test", "replica-test"), "the replica's directory is nobody's business"
    paths = json.loads(await read(f"{base}/openapi.json"))["paths"]
    assert {"/health", "/metrics", "/v1/models", "/v1/chat/completions"} <= set(paths)
    assert not [path for path in paths if path.count("/") > 1 and not path.startswith("/v1/")], "not reachable"
    chat = {"model": "replica-test", "messages": [{"role": "user", "content": "12"}], "max_tokens": 4}
    digits = json.loads(await read(f"{base}/v1/chat/completions", chat | {"structured_outputs": {"regex": "[0-9]+"}}))
    assert digits["choices"][0]["message"]["content"].isdigit()
    no_brace = chat | {"response_format": {"type": "json_object"}}
    assert await fetch(f"{base}/v1/chat/completions", no_brace) == 400, "the vocabulary has no {"
    *_, error, _ = (await read(f"{base}/v1/chat/completions", no_brace | {"stream": True})).split(b"\n\n")[:-1]
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 400
    assert await fetch(f"{base}/v1/chat/completions", chat) == 200


async def a_gateway_answers_as_the_replica(there: Any) -> None:
    """Replies are equal except for the id and time that vLLM creates per request. The number of tokens per event also depends on time."""
    base = f"http://{there.lease.http_address}"
    text = {
        "model": "replica-test",
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 3,
        "return_token_ids": True,
    }
    chat = {"model": "replica-test", "messages": [{"role": "user", "content": "12"}], "max_tokens": 12, "temperature": 0}
    asked = [
        ("/v1/completions", text),
        ("/v1/completions", text | {"echo": True}),
        ("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 2}),
    ]
    async with gateway(there.run) as http:
        for path, body in asked:
            direct, through = await read(base + path, body), await http.post(path, json=body)
            assert len(direct) > 500 and anonymous(through.content) == anonymous(direct)
            assert (through.headers["polyreme-policy-version"], through.headers["polyreme-replica"]) == ("0", there.lease.id)
            body = body | {"stream": True}
            direct, through = await read(base + path, body), await http.post(path, json=body | {"model": "replica-test@0"})
            assert through.content.endswith(b"data: [DONE]\n\n")
            assert merged(through.content) == merged(direct) != {}


def anonymous(reply: bytes) -> bytes:
    return re.sub(rb'"(id|created)":("[^"]*"|[0-9]+)', rb'"\1":0', reply)


def merged(stream: bytes) -> dict[str, Any]:
    """The choices of a stream's events, merged: texts and lists are concatenated, for other values the last one counts."""
    found: dict[str, Any] = {}

    def add(place: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, part in value.items():
                add(f"{place}.{name}", part)
        elif isinstance(value, str | list) and not place.endswith("finish_reason"):
            found[place] = found.get(place, type(value)()) + value
        elif value is not None:
            found[place] = value

    for event in stream.split(b"\n\n"):
        if event.startswith(b"data: {"):
            for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
                add("", choice)
    return found


async def http_shares_no_prefix_with_an_earlier_policy(learner: Learner, there: Any, model: Path) -> None:
    """Repeats a prompt longer than one block of the key-value cache (32 tokens on CPU) across swaps."""
    reference, prompt = Reference(model), [3 + place % 40 for place in range(150)]
    asked = {"model": "replica-test", "max_tokens": 24, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    chat = asked | {"messages": [{"role": "user", "content": "0123456789" * 15}]}
    base, answers = f"http://{there.lease.http_address}/v1", []
    for version, weights in enumerate(versions(model, 3), start=1):
        await learner.push(there.weights, version, weights)
        reference.load(weights)
        ids, _ = reference.greedy(prompt, 24)
        for own in ({}, {"cache_salt": "mine"}, {}):
            body = asked | {"prompt": prompt} | own
            told = json.loads(await read(f"{base}/completions", body))
            assert told["choices"][0]["token_ids"] == ids
        answers.append(ids)
        told = json.loads(await read(f"{base}/chat/completions", chat))
        assert len(told["prompt_token_ids"]) > 128
        assert told["choices"][0]["token_ids"] == reference.greedy(told["prompt_token_ids"], 24)[0]
    assert len({tuple(ids) for ids in answers}) == 3, "the versions could not be distinguished"


async def fetch(url: str, body: Any = None) -> int:
    try:
        await read(url, body)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    return 200


async def read(url: str, body: Any = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})

    def call() -> bytes:
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return bytes(answer.read())

    return await asyncio.to_thread(call)


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A temporary directory for the replica, with a path short enough for sockets, which must be empty at the end."""
    files = Path(tempfile.mkdtemp())
    monkeypatch.setenv("TMPDIR", str(files))
    yield
    files.rmdir()  # fails when it is not empty


@pytest.mark.real
@pytest.mark.usefixtures("emptied")
async def test_term_drains_and_leaves_no_files(redis_url: str, tmp_path: Path) -> None:
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    model = tiny_model("tied", tmp_path / "model", hidden_size=128)
    async with replica(redis_url, run_id, model, tmp_path / "replica.log", rollout_config(model)) as there:
        learner = Learner.of(run_id, model)
        await learner.push(there.weights, 0, next(versions(model, 1)))
        stream = aiter(there.rollout.Generate(request(run_id, PROMPT, [(0, [], 120, 0)]), timeout=300))
        responses = [await anext(stream)]
        there.child.signal(signal.SIGTERM)
        responses += [response async for response in stream]
        assert sum(len(chunk.token_ids) for response in responses for chunk in response.chunks) == 4 * 120
        family = psutil.Process(there.child.pid).children(recursive=True)
        assert await asyncio.wait_for(there.child.wait(), 120) == 0
        assert not psutil.wait_procs(family, timeout=300)[1]
        learner.arena.close()


@pytest.mark.parametrize("option", ["--port", "--http-port"])
def test_a_taken_port_is_one_clear_error(option: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "polyreme", "rollout", "--redis", "redis://127.0.0.1:1", option, port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"polyreme: error: expected a free port {port}")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_unreachable_redis_is_one_clear_error() -> None:
    command = [sys.executable, "-m", "polyreme", "rollout", "--redis", "redis://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
