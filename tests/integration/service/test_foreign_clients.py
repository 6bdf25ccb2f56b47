"""Clients that do not behave: the API, its log and learner are real, around simulated engines."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import zstandard
from redis.asyncio import Redis

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme.experience.requests import RequestBounds, RequestLog
from support.simulated_service import BASE, LONGEST, api, learner, sample

ERRORS = {400, 403, 404, 405, 409, 410, 413, 429}
"""Statuses of a refusal, each with a message and a category."""


class Client:
    """A client with a key."""

    def __init__(self, http: httpx.AsyncClient, key: str) -> None:
        self.http, self.headers = http, {"x-api-key": key}

    async def send(self, method: str, path: str, **given: Any) -> httpx.Response:
        """An answer, which is never an error of the server."""
        answer = await self.http.request(method, f"/api/v1/{path}", headers=self.headers | given.pop("headers", {}), **given)
        assert answer.status_code in {200, 204, 302, 408} | ERRORS, (path, answer.text)
        if answer.status_code in ERRORS:
            assert answer.json()["category"] == "user" and answer.json()["error"]
        return answer

    async def post(self, endpoint: str, status: int = 200, **fields: Any) -> Any:
        answer = await self.send("POST", endpoint, json=fields)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def session(self) -> str:
        return str((await self.post("create_session", tags=[], sdk_version="0.38.0"))["session_id"])

    async def model(self) -> str:
        session = await self.session()
        lora = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4, "seed": 1}}
        made = await self.post("create_model", **lora)
        await self.result(made["request_id"])
        return str(made["model_id"])

    async def result(self, request: str) -> httpx.Response:
        """The result of a request that is not asked to wait for long."""
        async with asyncio.timeout(60):
            while (answer := await self.send("POST", "retrieve_future", json={"request_id": request})).status_code == 408:
                pass
        assert answer.status_code == 200, answer.text
        return answer

    async def batch(self, body: bytes) -> httpx.Response:
        return await self.send("POST", "forward_backward", content=body)

    async def step(self, model: str, seq: int) -> None:
        """A batch and an optimizer step are answered."""
        sent = await self.batch(message(model, seq).SerializeToString())
        assert sent.status_code == 200, sent.text
        moved = await self.post("optim_step", model_id=model, seq_id=seq + 1)
        await self.result(sent.json()["request_id"])
        assert "metrics" in (await self.result(moved["request_id"])).json()


def message(model: str, seq: int) -> pb.ForwardBackwardRequest:
    tokens = np.array([5, 9, 14], "<i4").tobytes()
    targets = pb.TensorData(dense=np.array([9, 14, 7], "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[3])
    text = pb.InputChunk(encoded_text=pb.EncodedText(tokens=tokens))
    datum = pb.Datum(model_input=[text], loss_fn_inputs={"target_tokens": targets})
    return pb.ForwardBackwardRequest(model_id=model, seq_id=seq, data=[datum], loss_fn="cross_entropy")


@pytest.fixture
def limits() -> RequestBounds:
    """Of the request log."""
    return RequestBounds()


@pytest.fixture
async def http(redis: Redis, run_id: str, tmp_path: Path, limits: RequestBounds) -> AsyncIterator[httpx.AsyncClient]:
    log = RequestLog(redis, run_id, limits)
    transport = httpx.ASGITransport(api(log, tmp_path).app(), raise_app_exceptions=False)
    async with log.following(), httpx.AsyncClient(transport=transport, base_url="http://api") as client:
        stop = asyncio.Event()
        working = [asyncio.create_task(learner(log, tmp_path).run(stop)), asyncio.create_task(sample(log, stop))]
        try:
            yield client
            assert not any(task.done() for task in working), "a request ended the learner or the sampler"
        finally:
            for task in working:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


@pytest.fixture
def client(http: httpx.AsyncClient) -> Client:
    return Client(http, "tml-one")


async def test_malformed_batches_are_refused(client: Client) -> None:
    """Bytes of a good batch are changed, cut and repeated; what remains readable is executed or refused, and the model goes on."""
    model, rng, seq = await client.model(), random.Random(1), 1
    for _ in range(300):
        body = bytearray(message(model, seq).SerializeToString())
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(body))
            change = rng.randrange(3)
            if change == 0:
                body[place] = rng.randrange(256)
            elif change == 1:
                del body[place : place + rng.randrange(1, 9)]
            else:
                body[place:place] = rng.randbytes(rng.randrange(1, 9))
            if not body:
                break
        sent = await client.batch(bytes(body))
        if sent.status_code == 200 and sent.json()["request_id"] == f"{model}:{seq}":
            seq += 1
    await client.step(model, seq)


async def test_malformed_bodies_are_refused(client: Client) -> None:
    model = await client.model()
    bodies = [b"", b"\xff\xfe", b"[]", b'"x"', b"{" * 100_000, b'{"model_id":' + b"[" * 100_000, b'{"model_id": "\\ud800"}']
    bodies += [json.dumps({"model_id": model, key: value}).encode() for key, value in STRANGE]
    paths = [
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "load_weights",
        "asample",
        "create_session",
        "create_model",
    ]
    for path in [*paths, "retrieve_future", "weights_info", "session_heartbeat", "get_info", "unload_model"]:
        for body in bodies:
            if path != "unload_model" or b"model_id" not in body or b"ud800" in body:
                await client.send("POST", path, content=body)
    bomb = {"content-encoding": "zstd"}
    assert (
        await client.send("POST", "forward_backward", content=zstandard.compress(bytes(64 << 20)), headers=bomb)
    ).status_code == 413
    assert (await client.send("POST", "forward_backward", content=b"no zstd", headers=bomb)).status_code == 400
    await client.step(model, 1)


STRANGE: list[tuple[str, Any]] = [
    *(("seq_id", value) for value in (0, -1, 2**31, 10**400, 1.5, "1", None, [1], True, float("nan"))),
    *(("ttl_seconds", value) for value in (0, -1, 1e300, float("inf"), "1")),
    *(("path", value) for value in ("..", "a/b", "", "x" * 1000, "\x00", 7)),
    *(("user_metadata", value) for value in ({"a": "\ud800"}, {"a": "x" * 100_000}, [1])),
    ("\ud800", 1),
]


async def test_numbers_that_would_end_an_engine_are_refused(client: Client) -> None:
    """Each by name. The model and the sampler go on."""
    model, session = await client.model(), await client.session()
    for seq, (loss, option, value, problem) in enumerate(STRANGE_OPTIONS, start=1):
        given = message(model, seq)
        given.loss_fn, given.loss_fn_config[option] = loss, value
        sent = await client.batch(given.SerializeToString())
        assert problem in (await client.result(sent.json()["request_id"])).json()["error"]
    seq, long = len(STRANGE_OPTIONS) + 1, message(model, len(STRANGE_OPTIONS) + 1)
    long.data[0].model_input[0].encoded_text.tokens = np.full(LONGEST + 1, 5, "<i4").tobytes()
    long.data[0].loss_fn_inputs["target_tokens"].CopyFrom(
        pb.TensorData(dense=np.full(LONGEST + 1, 5, "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[LONGEST + 1])
    )
    sent = await client.batch(long.SerializeToString())
    assert f"at most {LONGEST} tokens in a sequence" in (await client.result(sent.json()["request_id"])).json()["error"]
    sampler = await client.post("create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model=BASE)
    about = {"sampling_session_id": sampler["sampling_session_id"], "prompt": {"chunks": [{"tokens": [5]}]}}
    for name, strange in STRANGE_SAMPLING:
        fields = {**about, "seq_id": 0, "sampling_params": {"max_tokens": 2, name: strange}}
        refused = await client.send("POST", "asample", content=json.dumps(fields))
        assert refused.status_code == 400 and refused.json()["error"].startswith(f"sampling_params.{name}: ")
    sent = await client.post("asample", **about, seq_id=0, sampling_params={"max_tokens": 2})
    assert (await client.result(sent["request_id"])).headers["content-type"] == "application/x-protobuf"
    await client.step(model, seq + 1)


STRANGE_OPTIONS = [
    ("ppo", "clip_low_threshold", float("nan"), "finite loss_fn_config.clip_low_threshold of ppo; found nan"),
    ("dro", "beta", float("-inf"), "finite loss_fn_config.beta of dro; found -inf"),
    ("ipo", "beta", 0.0, "finite loss_fn_config.beta above 0 of ipo; found 0.0"),
    ("sapo", "tau_negative", -1.0, "finite loss_fn_config.tau_negative above 0 of sapo; found -1.0"),
    ("cross_entropy", "beta", 1.0, "not supported: loss_fn_config.beta"),
]
STRANGE_SAMPLING: list[tuple[str, object]] = [
    *(("top_k", value) for value in (-2, 2**31, 10**30)),
    *(("temperature", value) for value in (-1, float("nan"), float("inf"))),
    *(("stop", value) for value in ("", "x" * 10_000, [""], [-1], [2**70], ["x"] * 65, [[1]])),
    *(("top_p", value) for value in (0, 1.5, float("nan"))),
    *(("max_tokens", value) for value in (0, -1, 1.5)),
]


async def test_a_refused_request_leaves_no_gap(client: Client) -> None:
    """The SDK's next request has the next number, and waits for those before it."""
    model = await client.model()
    refused: list[tuple[str, dict[str, object], str]] = [
        (
            "optim_step",
            {"adam_params": {"learning_rate": None}},
            "adam_params.learning_rate: expected a finite number; found null",
        ),
        ("optim_step", {"adam_params": {"learning_rate": -1}}, "adam_params.learning_rate"),
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "not supported: optimizer_params.type"),
        *(
            (path, {"path": "имя"}, "expected a name")
            for path in ("save_weights", "save_weights_for_sampler", "save_weights_external")
        ),
        ("save_weights", {"path": ""}, "expected a name"),
        ("save_weights", {"path": "a", "ttl_seconds": 0}, "ttl_seconds"),
        ("save_weights", {"path": "a", "user_metadata": {"a": "x" * 100_000}}, "user_metadata"),
        ("load_weights", {"path": "/etc/passwd"}, "expected tinker://"),
        ("load_weights", {"path": 7}, "path"),
        ("load_weights", {"path": f"tinker://{model}/weights/none"}, "expected a saved checkpoint"),
    ]
    for seq, (path, fields, problem) in enumerate(refused, start=1):
        sent = await client.post(path, model_id=model, seq_id=seq, **fields)
        answer = (await client.result(sent["request_id"])).json()
        assert problem in answer["error"] and answer["category"] == "user", answer
    await client.step(model, len(refused) + 1)


async def test_a_checkpoint_that_is_deleted_several_times_at_once(client: Client) -> None:
    model = await client.model()
    for seq in range(1, 9):
        saved = await client.post("save_weights", model_id=model, seq_id=seq, path="mine")
        assert "path" in (await client.result(saved["request_id"])).json()
        place = f"training_runs/{model}/checkpoints/weights/mine"
        asked = [client.send("DELETE", place) for _ in range(4)]
        asked += [client.send("PUT", f"{place}/ttl", json={"ttl_seconds": 60}), client.send("GET", "checkpoints")]
        answers = await asyncio.gather(*asked)
        assert 204 in {answer.status_code for answer in answers[:4]}
    assert (await client.send("GET", "checkpoints")).json()["checkpoints"] == []


async def test_the_first_request_of_a_models_number_stands(client: Client) -> None:
    model = await client.model()
    again = {"session_id": model.partition(":")[0], "model_seq_id": 0, "base_model": f"{BASE}:critic", "lora_config": {"rank": 9}}
    assert (await client.post("create_model", **again))["model_id"] == model
    about = await client.post("get_info", model_id=model)
    assert (about["lora_rank"], about["model_name"]) == (4, BASE)
    await client.step(model, 1)


async def test_wrong_numbers_are_refused(client: Client) -> None:
    model = await client.model()
    first = await client.post("optim_step", model_id=model, seq_id=1)
    for seq in (3, 2**31 - 1):
        await client.post("optim_step", 409, model_id=model, seq_id=seq)
    for seq in (0, -1, -(2**31)):
        assert (await client.batch(message(model, seq).SerializeToString())).status_code == 400
    again = await client.batch(message(model, 1).SerializeToString())
    assert again.json()["request_id"] == first["request_id"], "the first request of a number stands"
    assert "metrics" in (await client.result(first["request_id"])).json()
    await client.step(model, 2)


async def test_another_tenants_names_do_not_exist(client: Client) -> None:
    model = await client.model()
    session = model.partition(":")[0]
    saved = await client.post("save_weights", model_id=model, seq_id=1, path="mine")
    sampler = await client.post("save_weights_for_sampler", model_id=model, seq_id=2, path="mine")
    snapshot = await client.post("save_weights_for_sampler", model_id=model, seq_id=3, sampling_session_seq_id=4)
    paths = [(await client.result(each["request_id"])).json()["path"] for each in (saved, sampler, snapshot)][:2]
    other = Client(client.http, "tml-two")
    own = await other.session()
    prompt = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
    asked: list[tuple[str, dict[str, Any]]] = [
        *((path, {"model_id": model}) for path in ("get_info", "unload_model")),
        *((path, {"model_id": model, "seq_id": 4, "path": "x"}) for path in ("save_weights", "save_weights_for_sampler")),
        ("save_weights_external", {"model_id": model, "seq_id": 4, "path": "x"}),
        ("optim_step", {"model_id": model, "seq_id": 4}),
        ("session_heartbeat", {"session_id": session}),
        ("create_model", {"session_id": session, "model_seq_id": 9, "base_model": BASE}),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 9, "base_model": BASE}),
        ("asample", {**prompt, "sampling_session_id": f"{session}:sample:4", "seq_id": 0}),
        ("retrieve_future", {"request_id": saved["request_id"]}),
        *(("weights_info", {"tinker_path": path}) for path in paths),
        *(("load_weights", {"session_id": own, "model_seq_id": 0, "path": path}) for path in paths),
        *(("create_sampling_session", {"session_id": own, "sampling_session_seq_id": 0, "model_path": path}) for path in paths),
        *(("asample", {**prompt, "model_path": path}) for path in paths),
    ]
    for path, fields in asked:
        assert (await other.send("POST", path, json=fields)).status_code in (400, 404), path
    assert (await other.batch(message(model, 4).SerializeToString())).status_code == 404
    checkpoint = f"training_runs/{model}/checkpoints/weights/mine"
    for method, path in (
        *(("GET", f"sessions/{session}"), ("POST", f"sessions/{session}/finish"), ("GET", f"training_runs/{model}")),
        *(("DELETE", checkpoint), ("PUT", f"{checkpoint}/ttl"), ("GET", f"samplers/{session}:sample:4")),
    ):
        assert (await other.send(method, path)).status_code in (400, 404), path
    assert (await other.send("GET", f"training_runs/{model}/checkpoints")).json()["checkpoints"] == []
    await client.step(model, 4)
    assert len((await client.send("GET", f"training_runs/{model}/checkpoints")).json()["checkpoints"]) == 3


async def test_paths_lead_nowhere_else(client: Client, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    model = await client.model()
    for name in ("..", "../secret", "%2e%2e", "..%2f..%2fsecret", "weights/../../secret", "\\..", "secret%00"):
        for place in ("checkpoints/weights", "checkpoints/external_weights", f"checkpoints/{name}"):
            for method in ("GET", "DELETE"):
                assert (await client.send(method, f"training_runs/{model}/{place}/{name}")).content != b"x"
        answer = await client.send("GET", f"files/{model}/{name}/{name}?expires=99999999999&signature=0")
        assert answer.content != b"x"
    assert (tmp_path / "secret").exists()


async def test_two_thousand_sessions_leave_room_for_one_more(client: Client) -> None:
    """A hundred of them have a model. There is memory for 32; the others are on disk, and a client trains."""
    mine = await client.model()
    many = [Client(client.http, f"tml-{number % 50}") for number in range(2000)]
    sessions = [await each.session() for each in many]
    assert len(set(sessions)) == 2000
    lora = {"model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 4}}
    made = [
        await each.post("create_model", session_id=name, **lora) for each, name in zip(many[:100], sessions[:100], strict=True)
    ]
    results = [(await each.result(new["request_id"])).json() for each, new in zip(many[:100], made, strict=True)]
    assert not any("error" in result for result in results)
    for each, name in zip(many, sessions, strict=True):
        await each.post("session_heartbeat", session_id=name)
    listed = (await many[0].send("GET", "sessions", params={"limit": 100})).json()["sessions"]
    assert len(listed) == 40 and set(listed) == set(sessions[::50])
    await client.step(mine, 1)


@pytest.mark.parametrize("limits", [RequestBounds(result_bytes=2000)])
async def test_a_client_that_reads_nothing_is_stopped_by_its_own_bound(client: Client, redis: Redis) -> None:
    """Its results go, the oldest first; its requests are executed, and another client is not concerned."""
    model, other = await client.model(), Client(client.http, "tml-two")
    for seq in range(1, 101):
        assert (await client.batch(message(model, seq).SerializeToString())).status_code == 200
    await client.step(model, 101)
    theirs = await other.model()
    await other.step(theirs, 1)
    await client.post("retrieve_future", 410, request_id=f"{model}:1")
    assert (await client.send("POST", "retrieve_future", json={"request_id": f"{model}:102"})).status_code == 200
