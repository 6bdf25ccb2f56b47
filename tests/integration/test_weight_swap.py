"""Pushed weights in real vLLM: what the replica computes with is what was pushed, name by name and token by token."""

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
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from polyreme.api.v1 import rollout_pb2
from polyreme.weights.canary import LIMITS, Canary
from polyreme.weights.delta import diff
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest
from polyreme_trainer.weight_sync.replica_client import ReplicaClient, SwapError, Version
from support.gateways import gateway
from support.models import Kind, tiny_model
from support.replicas import Learner, generate, hf_weights, model_files, replica, request, rollout_config
from support.worker_weights import digest, rank_weights

TESTS = Path(__file__).resolve().parents[1]
PROMPT = [5, 6, 7, 8, 9]
WRONG = "model.layers.1.self_attn.k_proj.weight"
LAYOUTS = [("tied", 1), ("untied", 1), ("tied", 2), ("untied", 2)]


class Reference:
    """The same weights in `transformers`."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch, self._model = torch, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def load(self, weights: dict[str, np.ndarray]) -> None:
        tensors = {name: self._torch.tensor(array) for name, array in weights.items()}
        self._model.load_state_dict(tensors, strict=False)
        self._model.tie_weights()

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        """Ids, and the log-probability of each."""
        ids = list(prompt)
        logprobs = []
        with self._torch.no_grad():
            for _ in range(tokens):
                row = self._model(self._torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(row.argmax()))
                logprobs.append(float(row[ids[-1]]))
        return ids[len(prompt) :], logprobs

    def canary(self, ids: list[int]) -> Canary:
        """The log-probabilities of ids[1:]."""
        with self._torch.no_grad():
            rows = self._model(self._torch.tensor([ids])).logits[0].log_softmax(-1)
        return Canary(tuple(ids), tuple(float(row[token]) for row, token in zip(rows, ids[1:], strict=False)), LIMITS["float32"])


def versions(model: Path, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Weights that differ by a good deal from one version to the next."""
    weights, rng = hf_weights(model), np.random.default_rng(0)
    for _ in range(count):
        weights = {
            name: (array + 0.3 * array.std() * rng.normal(size=array.shape)).astype("<f4") for name, array in weights.items()
        }
        yield weights


@pytest.mark.real
@pytest.mark.parametrize(("kind", "parallel"), LAYOUTS)
async def test_answers_are_those_of_the_pushed_weights(kind: Kind, parallel: int, redis_url: str, tmp_path: Path) -> None:
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    model = tiny_model(kind, tmp_path / "model", hidden_size=128)
    reference = Reference(model)
    config = rollout_config(model, tensor_parallel=parallel)
    async with replica(redis_url, run_id, model, tmp_path / "replica.log", config) as there:
        learner = Learner.of(run_id, model)
        try:
            for version, weights in enumerate(versions(model, 3)):
                committed = await learner.push(there.weights, version, weights)
                assert committed.stall_seconds >= committed.reload_seconds > 0
                reference.load(weights)
                ids, logprobs = reference.greedy(PROMPT, 32)
                answer = (await generate(there.rollout, request(run_id, PROMPT, [(0, [], 32, 0)])))[0]
                assert answer.ids == ids
                assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
                assert answer.spans == [(version, 0, 32)]
            await broken_version_is_rolled_back(learner, there, weights)
            assert (await generate(there.rollout, request(run_id, PROMPT, [(0, [], 32, 0)])))[0].ids == ids
            await learner.push(there.weights, 9, next(versions(model, 1)))
            answer = (await generate(there.rollout, request(run_id, PROMPT, [(0, [], 32, 0)])))[0]
            assert answer.ids != ids
            assert answer.spans == [(9, 0, 32)]
            await streamed_versions_are_served_and_gone_back_to(learner, there, model, reference)
            assert not [
                name for name in os.listdir("/dev/shm") if name.startswith("vllm_dist_")
            ]  # also while it runs: a kill leaves nothing
        finally:
            learner.arena.close()


async def streamed_versions_are_served_and_gone_back_to(learner: Learner, there: Any, model: Path, reference: Reference) -> None:
    """As from another host: into the replica's own memory, from where its workers load."""
    link = ReplicaClient(there.lease, learner.arena)

    async def push(version: int, weights: dict[str, np.ndarray]) -> None:
        staging = learner.write(version, weights)
        sent = Version(staging.manifest, staging.slot, staging.generation)
        await link.stream(sent)
        await link.commit(sent)

    for version, weights in enumerate(versions(model, 3), start=10):
        await push(version, weights)
        reference.load(weights)
        ids, _ = reference.greedy(PROMPT, 32)
        answer = (await generate(there.rollout, request(learner.run_id, PROMPT, [(0, [], 32, 0)])))[0]
        assert (answer.ids, answer.spans) == (ids, [(version, 0, 32)])
    good, learner.layout = learner.layout, misshapen(learner.layout, weights)
    with pytest.raises(SwapError, match="version 12 is served again"):
        await push(13, {name: array for name, array in weights.items() if name != WRONG})
    learner.layout = good
    answer = (await generate(there.rollout, request(learner.run_id, PROMPT, [(0, [], 32, 0)])))[0]
    assert (answer.ids, answer.spans) == (ids, [(12, 0, 32)])
    await deltas_and_canaries(learner, there, link, reference, weights)
    await link.close()


async def deltas_and_canaries(
    learner: Learner, there: Any, link: ReplicaClient, reference: Reference, weights: dict[str, np.ndarray]
) -> None:
    """Sparse versions over the one that was streamed: the workers' answers are those of the new weights, and a canary finds wrong ones."""
    rng, ask = np.random.default_rng(1), request(learner.run_id, PROMPT, [(0, [], 32, 0)])
    before, base = learner.write(12, weights), learner.slot
    old = Manifest.from_proto(before.manifest)
    for version in (14, 15, 16):
        weights = {name: np.where(rng.random(a.shape) < 0.02, a * np.float32(1.5), a) for name, a in weights.items()}
        staged = learner.write(version, weights)
        delta = diff(
            old, learner.arena.slot_view(base), Manifest.from_proto(staged.manifest), learner.arena.slot_view(learner.slot)
        )
        assert delta is not None
        reference.load(weights)
        canary = reference.canary([*PROMPT, 3, 2, 1])
        if version == 15:
            canary = replace(canary, logprobs=tuple(value - 0.1 for value in canary.logprobs))
        sent = Version(staged.manifest, staged.slot, staged.generation, canary.to_proto())
        assert (await link.stream_delta(delta, sent)).nbytes < old.nbytes / 8
        if version == 15:
            with pytest.raises(SwapError, match=r"version 15 failed its canary.*nothing is served"):
                await link.commit(sent)
            with pytest.raises(grpc.aio.AioRpcError, match="found none"):
                await generate(there.rollout, ask)
        else:
            assert (await link.commit(sent)).canary_difference < 1e-4
            answer = (await generate(there.rollout, ask))[0]
            assert (answer.ids, answer.spans) == (reference.greedy(PROMPT, 32)[0], [(version, 0, 32)])
        old, base = Manifest.from_proto(staged.manifest), learner.slot


def misshapen(good: Manifest, weights: dict[str, np.ndarray]) -> Manifest:
    """The layout with one tensor of the wrong shape, inside a fused layer."""
    specs = [TensorSpec(name, "F32", (3, 3) if name == WRONG else array.shape) for name, array in sorted(weights.items())]
    return plan_manifest(specs, {tensor.name: tensor.alias_of for tensor in good.tensors if tensor.alias_of})


async def broken_version_is_rolled_back(learner: Learner, there: Any, weights: dict[str, np.ndarray]) -> None:
    """A version with one tensor of the wrong shape, inside a fused layer: right digests, right names, and no way to load it."""
    good, learner.layout = learner.layout, misshapen(learner.layout, weights)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await learner.push(there.weights, 5, {name: array for name, array in weights.items() if name != WRONG})
    learner.layout = good
    assert refused.value.code() == grpc.StatusCode.INTERNAL
    assert "version 2 is served again" in refused.value.details()
    answer = await there.rollout.Describe(rollout_pb2.DescribeRequest(), timeout=300)
    assert (answer.has_version, answer.version, answer.quarantined) == (True, 2, False)


@pytest.mark.real
@pytest.mark.parametrize(("kind", "parallel"), LAYOUTS)
def test_the_workers_hold_the_pushed_tensors(kind: Kind, parallel: int, tmp_path: Path) -> None:
    model = tiny_model(kind, tmp_path / "model", hidden_size=128)
    (files := tmp_path / "files").mkdir()
    for name, data in model_files(model).items():
        (files / name).write_bytes(data)
    learner = Learner.of(f"test-{uuid.uuid4().hex[:12]}", model)
    try:
        pushed = list(versions(model, 2))
        stagings = []
        for version, weights in enumerate(pushed):
            stagings.append(tmp_path / f"{version}.pb")
            stagings[-1].write_bytes(learner.write(version, weights).SerializeToString())
        command = [sys.executable, "-m", "support.engine_digests", str(files), str(parallel), *map(str, stagings)]
        environment = os.environ | {"PYTHONPATH": str(TESTS)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        for weights, loaded in zip(pushed, json.loads(done.stdout.splitlines()[-1]), strict=True):
            workers = loaded["workers"]
            assert len(workers) == parallel
            for rank, answer in enumerate(workers):
                expected = {name: digest(array) for name, array in rank_weights(weights, kind == "tied", rank, parallel).items()}
                assert {name: (tuple(shape), value) for name, (shape, value) in answer.items()} == expected
    finally:
        learner.arena.close()


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
    """To the byte, but for what vLLM makes anew for each request: its id and time. How many tokens an event has depends on time too."""
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
    """The choices of a stream's events, put together: texts and lists joined by their place in the choice, all else by its last value."""
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
    """A prompt beyond one block of the key-value cache (128 tokens on CPU), again and again, over swaps."""
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
    """A temporary directory for the replica, with a path short enough for sockets; nothing may be left in it."""
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
