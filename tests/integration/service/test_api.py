"""The endpoints of the Tinker API on a real request log, without the processes that execute requests."""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from redis.asyncio import Redis

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme.config.trainer import LoraConfig
from polyreme.errors import StoreError
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.requests import RequestLog, place_of
from polyreme.experience.store import connect
from polyreme_trainer.service.api import ServiceApi
from polyreme_trainer.service.folders import FACTS, Facts, Folders
from polyreme_trainer.service.wire import Request, json_result

MODEL = f"{'a' * 32}:train:0"
TENANT = hashlib.sha256(b"").hexdigest()[:16]
"""Of clients without a key."""


class Client:
    """A client of the application, and what the log has got from it."""

    def __init__(self, http: httpx.AsyncClient, log: RequestLog, root: Path) -> None:
        self.http, self.log, self.root = http, log, root

    async def post(self, name: str, status: int = 200, **fields: Any) -> Any:
        answer = await self.http.post(f"/api/v1/{name}", json=fields)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def model(self, **lora: Any) -> str:
        """The id of a new model."""
        session = (await self.post("create_session", tags=[], sdk_version="0.38.0", type="create_session"))["session_id"]
        given = {"session_id": session, "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4, **lora}}
        return str((await self.post("create_model", **given))["model_id"])

    async def logged(self, worker: Any = "learner") -> list[Request]:
        return [Request.unpack(await self.log.payload(place)) for place in await self.log.open(worker)]


@pytest.fixture
def hold_seconds() -> float:
    """How long an answer is held for its result."""
    return 60.0


@pytest.fixture
async def client(redis: Redis, run_id: str, tmp_path: Path, hold_seconds: float) -> AsyncIterator[Client]:
    log = RequestLog(redis, run_id)
    app = ServiceApi(log, Folders(tmp_path), "base", "/models/base", "llama", 64, "key", hold_seconds=hold_seconds).app()
    async with log.following(), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as http:
        yield Client(http, log, tmp_path)


async def test_a_client_learns_what_is_served(client: Client) -> None:
    served = (await client.http.get("/api/v1/get_server_capabilities")).json()["supported_models"]
    assert [(model["model_name"], model["max_context_length"]) for model in served] == [("base", 64)]
    assert (await client.http.get("/api/v1/healthz")).json() == {"status": "ok"}
    assert (await client.post("client/config", sdk_version="0.38.0"))["parallel_fwdbwd_chunks"] is False
    assert await client.post("client/dynamic_config") == {}
    assert await client.post("telemetry", events=[]) == {"status": "accepted"}
    model = await client.model(seed=3)
    assert await client.post("session_heartbeat", session_id=model.partition(":")[0]) == {"type": "session_heartbeat"}
    info = await client.post("get_info", model_id=model)
    assert (info["lora_rank"], info["is_lora"], info["model_data"]["tokenizer_id"]) == (4, True, "/models/base")


async def test_a_repeated_request_has_the_same_id_and_is_logged_once(client: Client) -> None:
    model = await client.model()
    step = {"model_id": model, "seq_id": 1, "adam_params": {"learning_rate": 0.5}}
    assert await client.post("optim_step", **step) == await client.post("optim_step", **step)
    logged = await client.logged()
    assert [request.op for request in logged] == ["create_model", "optim_step"]
    assert logged[1].fields["adam"]["learning_rate"] == 0.5


async def test_a_request_before_its_time_is_to_be_sent_again(client: Client) -> None:
    model = await client.model()
    await client.post("optim_step", 409, model_id=model, seq_id=2)
    await client.post("optim_step", model_id=model, seq_id=1)
    await client.post("optim_step", model_id=model, seq_id=2)


async def test_a_batch_comes_whole_or_compressed(client: Client) -> None:
    model = await client.model()
    tokens = np.array([1, 2], "<i4").tobytes()
    targets = pb.TensorData(dense=np.array([2, 3], "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[2])
    datum = pb.Datum(
        model_input=[pb.InputChunk(encoded_text=pb.EncodedText(tokens=tokens))], loss_fn_inputs={"target_tokens": targets}
    )
    bodies = []
    for seq, forward_only in ((1, False), (2, True)):
        given = pb.ForwardBackwardRequest(
            model_id=model, seq_id=seq, data=[datum], loss_fn="cross_entropy", forward_only=forward_only
        )
        bodies.append(given.SerializeToString())
    plain = {"content-type": "application/x-protobuf"}
    assert (await client.http.post("/api/v1/forward_backward", content=bodies[0], headers=plain)).status_code == 200
    packed, zstd = zstandard.compress(bodies[1]), {**plain, "content-encoding": "zstd"}
    assert (await client.http.post("/api/v1/forward_backward", content=packed, headers=zstd)).status_code == 200
    assert [(request.op, request.body) for request in (await client.logged())[1:]] == [
        ("forward_backward", bodies[0]),
        ("forward", bodies[1]),
    ]
    refused = await client.http.post("/api/v1/forward_backward", content=bodies[0], headers={"content-encoding": "br"})
    assert (refused.status_code, refused.json()["category"]) == (400, "user")


async def test_a_batch_that_is_refused_keeps_its_place(client: Client) -> None:
    """The client's next request has the next number."""
    model = await client.model()
    body = pb.ForwardBackwardRequest(model_id=model, seq_id=1, loss_fn="stable_reinforce").SerializeToString()
    assert (await client.http.post("/api/v1/forward_backward", content=body)).status_code == 200
    refused = (await client.logged())[1]
    assert refused.op == "refused" and "stable_reinforce" in refused.fields["message"]


async def test_a_batch_of_very_many_datums_holds_up_nobody(client: Client) -> None:
    model = await client.model()
    targets = pb.TensorData(dense=np.array([2], "<i4").tobytes(), dtype=pb.DTYPE_INT32)
    text = pb.InputChunk(encoded_text=pb.EncodedText(tokens=np.array([1], "<i4").tobytes()))
    data = [pb.Datum(model_input=[text], loss_fn_inputs={"target_tokens": targets})] * 30_000
    batch = pb.ForwardBackwardRequest(model_id=model, seq_id=1, data=data, loss_fn="cross_entropy")
    sending = asyncio.create_task(client.http.post("/api/v1/forward_backward", content=batch.SerializeToString(), timeout=60.0))
    times = [time.monotonic()]
    while not sending.done():
        await asyncio.sleep(0.001)
        times.append(time.monotonic())
    assert (await sending).status_code == 200
    assert max(np.diff(times)) < (times[-1] - times[0]) / 2


async def test_an_answer_is_held_for_its_result(client: Client) -> None:
    model = await client.model()
    [place] = await client.log.open("learner")
    waiting = asyncio.create_task(client.post("retrieve_future", request_id=place.id, allow_metadata_only=True))
    await asyncio.sleep(0)
    await client.log.finish(place, json_result(type="create_model", model_id=model))
    async with asyncio.timeout(30):
        assert await waiting == {"type": "create_model", "model_id": model}


@pytest.mark.parametrize("hold_seconds", [0.0])
async def test_a_result_that_is_not_there_yet_is_asked_for_again(client: Client) -> None:
    await client.model()
    [place] = await client.log.open("learner")
    again = await client.post("retrieve_future", 408, request_id=place.id)
    assert (again["type"], again["queue_state"]) == ("try_again", "active")
    await client.post("retrieve_future", 404, request_id="other:0")


async def test_stop_strings_leave_the_models_own_end_tokens(client: Client) -> None:
    sample: dict[str, Any] = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "base_model": "base"}
    for stop in (None, "]", ["]", "."], [5, 6], []):
        await client.post("asample", **sample, sampling_params={"stop": stop})
    found = [(request.fields["stop_ids"], request.fields["stop_strings"]) for request in await client.logged("sampler")]
    assert found == [(None, []), (None, ["]"]), (None, ["]", "."]), ([5, 6], []), ([], [])]


async def test_a_prompt_that_no_sampler_takes_is_not_logged(client: Client) -> None:
    """It would take the room of others' requests."""
    sample: dict[str, Any] = {"base_model": "base", "sampling_params": {}}
    for length, status in ((63, 200), (64, 400)):
        await client.post("asample", status, **sample, prompt={"chunks": [{"tokens": [1] * 32}, {"tokens": [1] * (length - 32)}]})
    assert [len(request.fields["prompt"]) for request in await client.logged("sampler")] == [63]


async def test_metadata_that_is_no_json_is_refused(client: Client) -> None:
    """It would be in no list of sessions any more."""
    for number in (b"NaN", b"1e999"):
        answer = await client.http.post("/api/v1/create_session", content=b'{"user_metadata": {"a": %s}}' % number)
        assert answer.status_code == 400 and "JSON" in answer.json()["error"]


async def test_a_sampling_session_knows_its_checkpoint(client: Client) -> None:
    model = await client.model()
    session = model.partition(":")[0]
    saved = await client.post("save_weights_for_sampler", model_id=model, seq_id=1, sampling_session_seq_id=7, kind="snapshot")
    assert saved["request_id"] == f"{model}:1"
    folder = client.root / model / "sampler_weights" / "request-1"
    sample: dict[str, Any] = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"tokens": [3]}]}}
    sample |= {"sampling_session_id": f"{session}:sample:7", "seq_id": 0, "num_samples": 2}
    await client.post("asample", 400, **sample, sampling_params={})  # the learner has not written it
    folder.mkdir(parents=True)
    (folder / FACTS).write_text(Facts("base", LoraConfig(rank=4), 1, 0, tenant=TENANT).to_json())
    asked = await client.post("asample", **sample, sampling_params={"max_tokens": 3, "stop": [5], "seed": None})
    assert asked["sample_sequence_ids"] == [f"{session}:sample:7:0:0", f"{session}:sample:7:0:1"]
    [request] = await client.logged("sampler")
    assert request.fields["weights"] == str(folder.resolve())
    assert (request.fields["prompt"], request.fields["stop_ids"], request.fields["samples"]) == ([1, 2, 3], [5], 2)
    assert (await client.http.get(f"/api/v1/samplers/{session}:sample:7")).json()["base_model"] == "base"
    info = await client.post("weights_info", tinker_path=f"tinker://{model}/sampler_weights/request-1")
    assert info["lora_rank"] == 4 and info["train_mlp"] and not info["train_unembed"]


async def test_unknown_names_and_features_are_refused(client: Client) -> None:
    model = await client.model()
    session = model.partition(":")[0]
    wrong = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "another"}
    assert "another" in (await client.post("create_sampling_session", 400, **wrong))["error"]
    await client.post("get_info", 404, model_id=MODEL)
    await client.post("optim_step", 404, model_id=MODEL, seq_id=1)
    await client.post("save_weights", model_id=model, seq_id=1, path="../x")
    assert "expected a name" in (await client.logged())[-1].fields["message"], "it has its place in the model's order"
    assert "not supported: custom losses" in (await client.post("create_custom_loss", 400))["error"]
    assert "not supported: POST" in (await client.post("another", 404))["error"]
    answer = await client.http.post("/api/v1/optim_step", content=b"{")
    assert (answer.status_code, json.loads(answer.text)["category"]) == (400, "user")


async def test_unloading_follows_the_models_last_request(client: Client) -> None:
    model = await client.model()
    await client.post("unload_model", model_id=model)
    assert [request.op for request in await client.logged()] == ["create_model", "unload_model"]
    assert place_of(f"{model}:1", "learner").seq == 1
    for seq in (1, 2):
        assert "was unloaded" in (await client.post("optim_step", 400, model_id=model, seq_id=seq))["error"]


async def test_answers_are_held_no_longer_when_the_api_ends(redis: Redis, run_id: str, tmp_path: Path) -> None:
    log, ending = RequestLog(redis, run_id), asyncio.Event()
    app = ServiceApi(log, Folders(tmp_path), "base", "/models/base", "llama", 64, "key", hold_seconds=600, ending=ending).app()
    async with log.following(), httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as http:
        client = Client(http, log, tmp_path)
        held = asyncio.create_task(client.post("retrieve_future", 408, request_id=f"{await client.model()}:0"))
        await asyncio.sleep(0)
        ending.set()
        async with asyncio.timeout(300):
            assert (await held)["type"] == "try_again"


async def test_a_lost_redis_is_an_answer_and_then_the_end_of_the_process(tmp_path: Path) -> None:
    """The SDK sends a request with such an answer again."""
    server = await EmbeddedServer.open(tmp_path / "redis")
    redis = await connect(server.url)
    redis.reconnect_timeout = 0.1
    log = RequestLog(redis, "lost")
    app = ServiceApi(log, Folders(tmp_path), "base", "/models/base", "llama", 64, "key").app()
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://api") as http:
            with pytest.raises(StoreError):
                async with log.following():
                    server.stop()
                    await asyncio.Event().wait()
            for path in ("api/v1/create_session", "api/v1/get_info"):
                answer = await http.post(path, json={"model_id": MODEL} if "info" in path else {})
                assert (answer.status_code, answer.json()["category"]) == (503, "server")
    finally:
        await redis.aclose()
