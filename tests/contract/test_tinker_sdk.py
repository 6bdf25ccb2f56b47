"""Every public method of the Tinker SDK against the API: it is answered, or refused by name, and none ends as an unknown path.

The API, its log, learner and sampler are real; the engines are simulated.
"""

import asyncio
import gc
import inspect
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme.experience.store import connect
from support.simulated_service import BASE, simulated_service

tinker = pytest.importorskip("tinker")

from tinker import types  # noqa: E402
from tinker.lib.public_interfaces.admin_client import AdminClient  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the SDK's own
CLASSES = {
    each.__name__: each for each in (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient)
}
CLASSES["AdminClient"] = AdminClient
PROMPT = types.ModelInput.from_ints([5, 9, 14])
DATA = [types.Datum(model_input=PROMPT, loss_fn_inputs={"target_tokens": [9, 14, 7], "weights": [1.0, 0.5, 1.0]})]


def half(data: Any, logprobs: Any) -> Any:
    return -0.5 * sum(each.sum() for each in logprobs), {"custom/half:sum": 0.5}


def traced(logprobs: Any) -> Any:
    return -logprobs.sum(), {}


def shut(client: Any) -> None:
    """Closes a client's connections, which would be collected as unclosed."""
    asyncio.run_coroutine_threadsafe(client.holder.aclose(), client.holder.get_loop()).result()


@dataclass
class World:
    """Clients of one service, and what their methods need."""

    service: Any
    rest: Any
    training: Any
    sampling: Any
    admin: Any
    session: str
    saved: str
    external: str
    address: str
    count: int = 0

    def client(self, kind: str) -> Any:
        clients = {"ServiceClient": self.service, "TrainingClient": self.training, "SamplingClient": self.sampling}
        return (clients | {"RestClient": self.rest, "AdminClient": self.admin})[kind]

    def fresh(self) -> str:
        """A new name."""
        self.count += 1
        return f"name-{self.count}"

    def checkpoint(self) -> str:
        return str(self.training.save_state(self.fresh()).result().path)

    @property
    def run(self) -> str:
        return str(self.training.model_id)


@pytest.fixture(scope="module")
def world(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root, address, stop = tmp_path_factory.mktemp("sdk"), list[str](), threading.Event()

    async def serve() -> None:
        redis = await connect(redis_url)
        async with simulated_service(redis, "test-sdk", root) as url:
            address.append(url)
            await asyncio.to_thread(stop.wait)
        await redis.aclose()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    while not address:
        assert thread.is_alive()
        time.sleep(0.01)
    service = tinker.ServiceClient(base_url=address[0], api_key="tml-one")
    rest = tinker.RestClient(base_url=address[0], api_key="tml-one")
    training = service.create_lora_training_client(base_model=BASE, rank=4, seed=1).result()
    saved = training.save_state("first").result().path
    external = training.save_weights_external("files").result().path
    sampling = training.save_weights_and_get_sampling_client().result()
    session = service.holder.get_session_id()
    try:
        yield World(service, rest, training, sampling, AdminClient(rest.holder), session, saved, external, address[0])
    finally:
        service.close("success").result()
        shut(rest)
        stop.set()
        thread.join()
        gc.collect()  # the SDK leaves connections open, and this file ignores its warnings


Arguments = Callable[[World], tuple[Any, ...]]
NOTHING: Arguments = lambda world: ()  # noqa: E731
OPTIONS = types.SamplingParams(max_tokens=4, seed=1, top_p=0.9, stop=[1])
SUPPORTED: dict[str, Arguments] = {
    "ServiceClient.create_lora_training_client": lambda world: (BASE, 2),
    "ServiceClient.create_training_client_from_state": lambda world: (world.saved,),
    "ServiceClient.create_training_client_from_state_with_optimizer": lambda world: (world.saved, BASE),
    "ServiceClient.create_sampling_client": lambda world: (None, BASE),
    "ServiceClient.create_custom_loss": lambda world: (traced, {"logprobs": 1}),
    "ServiceClient.create_rest_client": NOTHING,
    "ServiceClient.get_server_capabilities": NOTHING,
    "TrainingClient.forward": lambda world: (DATA, "cross_entropy"),
    "TrainingClient.forward_backward": lambda world: (DATA, "cross_entropy"),
    "TrainingClient.forward_backward_custom": lambda world: (DATA, half),
    "TrainingClient.optim_step": lambda world: (types.AdamParams(learning_rate=0.1),),
    "TrainingClient.save_state": lambda world: (world.fresh(), 3600, False, {"note": "x"}),
    "TrainingClient.load_state": lambda world: (world.saved,),
    "TrainingClient.load_state_with_optimizer": lambda world: (world.saved,),
    "TrainingClient.save_weights_for_sampler": lambda world: (world.fresh(),),
    "TrainingClient.save_weights_external": lambda world: (world.fresh(),),
    "TrainingClient.save_weights_and_get_sampling_client": NOTHING,
    "TrainingClient.create_sampling_client": lambda world: (
        world.training.save_weights_for_sampler(world.fresh()).result().path,
    ),
    "SamplingClient.sample": lambda world: (PROMPT, 2, OPTIONS, True, 3),
    "SamplingClient.compute_logprobs": lambda world: (PROMPT, 2),
    "RestClient.get_server_capabilities": NOTHING,
    "RestClient.get_training_run": lambda world: (world.run,),
    "RestClient.get_training_run_by_tinker_path": lambda world: (world.saved,),
    "RestClient.get_weights_info_by_tinker_path": lambda world: (world.saved,),
    "RestClient.list_training_runs": NOTHING,
    "RestClient.list_checkpoints": lambda world: (world.run,),
    "RestClient.list_user_checkpoints": NOTHING,
    "RestClient.get_external_weights_urls": lambda world: (world.external,),
    "RestClient.delete_checkpoint": lambda world: (world.run, world.checkpoint().partition(f"{world.run}/")[2]),
    "RestClient.delete_checkpoint_from_tinker_path": lambda world: (world.checkpoint(),),
    "RestClient.set_checkpoint_ttl_from_tinker_path": lambda world: (world.saved, 3600),
    "RestClient.get_session": lambda world: (world.session,),
    "RestClient.list_sessions": NOTHING,
    "RestClient.get_sampler": lambda world: (world.rest.get_session(world.session).result().sampler_ids[0],),
}
"""Methods that are answered, with the arguments of a call."""
REFUSED: dict[str, Arguments] = {
    "ServiceClient.copy_weights": lambda world: (world.saved,),
    "RestClient.copy_weights": lambda world: (world.saved, "project"),
    "RestClient.publish_checkpoint_from_tinker_path": lambda world: (world.saved,),
    "RestClient.unpublish_checkpoint_from_tinker_path": lambda world: (world.saved,),
    "RestClient.assign_session_project": lambda world: (world.session, "project"),
    "RestClient.export_session_trace": lambda world: (world.session,),
    "RestClient.search_sessions": lambda world: (types.SessionSearchRequest(),),
    "RestClient.get_audit_log": NOTHING,
    "RestClient.get_billing_usage": lambda world: ("2026-01-01", "2026-01-02"),
    "RestClient.get_current_checkpoint_storage_usage": NOTHING,
    "AdminClient.get_audit_log": NOTHING,
    "AdminClient.get_billing_usage": lambda world: ("2026-01-01", "2026-01-02"),
    "AdminClient.get_current_checkpoint_storage_usage": NOTHING,
}
"""Methods that are refused by name."""
LOCAL = {
    *("get_telemetry", "get_console_url", "get_info", "get_tokenizer", "get_base_model", "get_sampler_handle"),
    *("from_sampler_handle", "on_queue_state_change", "whoami", "holder", "close", "create"),
}
"""Methods that ask the server for nothing, `close`, with which the world ends, and `create`, which create_sampling_client calls."""


def public() -> list[str]:
    return [
        f"{kind}.{name}"
        for kind, each in CLASSES.items()
        for name, value in inspect.getmembers(each)
        if not name.startswith("_") and name.removesuffix("_async") not in LOCAL and callable(value)
    ]


def call(world: World, method: str, table: dict[str, Arguments]) -> Any:
    kind, _, name = method.partition(".")
    answer = getattr(world.client(kind), name)(*table[method.removesuffix("_async")](world))
    if inspect.iscoroutine(answer):
        answer = asyncio.run(answer)
    return answer.result() if hasattr(answer, "result") else answer


@pytest.mark.parametrize("method", public())
def test_each_method_is_answered_or_refused_by_name(world: World, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_PROJECT_ID", "project")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if method.removesuffix("_async") in SUPPORTED:
            call(world, method, SUPPORTED)
            return
        with pytest.raises(tinker.BadRequestError, match="not supported: ") as caught:
            call(world, method, REFUSED)
        body: Any = caught.value.body
        assert body["category"] == "user"


def test_a_custom_loss_changes_a_model_by_its_gradient(world: World) -> None:
    """-0.5 times the sum of the log-probabilities, as a client's function and as cross entropy with weights of 0.5."""
    halves = [types.Datum(model_input=PROMPT, loss_fn_inputs={"target_tokens": [9, 14, 7], "weights": [0.5] * 3})]
    losses = []
    for train in (
        lambda model: model.forward_backward_custom(DATA, half),
        lambda model: model.forward_backward(halves, "cross_entropy"),
    ):
        model = world.service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
        trained = train(model).result()
        model.optim_step(types.AdamParams(learning_rate=0.1)).result()
        losses.append(model.forward(DATA, "cross_entropy").result().metrics["loss:sum"])
    assert losses[0] == losses[1]
    assert trained.metrics["loss:sum"] != losses[0]


def test_a_client_goes_on_after_each_refusal(world: World) -> None:
    """It numbers its requests, also those that are refused. It sends NaN as null."""
    model = world.service.create_lora_training_client(base_model=BASE, rank=4, seed=5).result()
    rate: Callable[[float], Any] = lambda value: model.optim_step(types.AdamParams(learning_rate=value))  # noqa: E731
    refusals: list[tuple[Callable[[], Any], str]] = [
        (lambda: rate(float("nan")), "expected a finite number; found null"),
        (lambda: rate(-1.0), "learning_rate"),
        (lambda: rate(1e38), "expected finite weights"),
        (lambda: model.save_state("имя"), "expected a name of up to 128"),
        (lambda: model.save_state("a", ttl_seconds=0), "ttl_seconds"),
        (lambda: model.save_weights_for_sampler("a/b"), "expected a name of up to 128"),
        (lambda: model.save_weights_external(""), "expected a name of up to 128"),
        (lambda: model.load_state("/etc/passwd"), "expected tinker://"),
        (lambda: model.forward_backward(DATA, "no_loss"), "not supported: loss_fn"),
    ]
    for ask, message in refusals:
        with pytest.raises(tinker.RequestFailedError, match=message) as caught:
            ask().result(300)
        assert caught.value.category == "user"
        assert model.forward(DATA, "cross_entropy").result(300).loss_fn_outputs


def values(data: list[Any]) -> list[Any]:
    """The datums of the same prompts for a critic."""
    loss = {name: np.full(3, value, np.float32) for name, value in {"returns": 1.0, "values": 0.5, "mask": 1.0}.items()}
    return [types.Datum(model_input=each.model_input, loss_fn_inputs=loss) for each in data]


def test_a_critic_is_created_trained_saved_and_continued(world: World) -> None:
    critic = world.service.create_lora_training_client(base_model=f"{BASE}:critic", rank=4).result()
    asked = [types.Datum(model_input=PROMPT), types.Datum(model_input=types.ModelInput.from_ints([5, 9]))]
    found = critic.forward(asked, "value").result()
    assert [output["values"].shape for output in found.loss_fn_outputs] == [[3], [2]]
    trained, moved = critic.forward_backward(values(DATA), "value", {"value_clip": 0.2}), critic.optim_step(types.AdamParams())
    assert trained.result().loss_fn_outputs[0].keys() == {"values"} and moved.result().metrics["step"] == 1
    path = critic.save_state(world.fresh()).result().path
    assert world.rest.get_weights_info_by_tinker_path(path).result().base_model == f"{BASE}:critic"
    same = world.service.create_training_client_from_state_with_optimizer(path).result()
    one, other = (model.forward(asked, "value").result().loss_fn_outputs for model in (critic, same))
    assert [each["values"].tolist() for each in one] == [each["values"].tolist() for each in other]
    assert same.get_info().model_name == world.rest.get_training_run(same.model_id).result().base_model == f"{BASE}:critic"
    assert critic.save_weights_external(world.fresh()).result().path


def test_what_a_critic_cannot_do_is_refused_by_name(world: World) -> None:
    critic = world.service.create_lora_training_client(base_model=f"{BASE}:critic", rank=4).result()
    refusals: list[tuple[Callable[[], Any], str]] = [
        (lambda: critic.forward_backward(DATA, "cross_entropy"), "expected loss_fn = value for a critic"),
        (
            lambda: world.training.forward_backward(values(DATA), "value"),
            f"expected a critic, {BASE}:critic, for loss_fn = value",
        ),
        (lambda: critic.save_weights_and_get_sampling_client(), "not supported: weights for a sampler of a critic"),
        (lambda: critic.load_state(world.saved), f"expected a checkpoint of {BASE}:critic"),
        (lambda: world.service.create_sampling_client(base_model=f"{BASE}:critic"), "not supported: sampling from"),
        (lambda: world.service.create_training_client_from_state(world.saved, f"{BASE}:critic"), "expected a checkpoint of"),
        (lambda: world.service.create_lora_training_client(f"{BASE}:critic", rank=0), "not supported: a critic with"),
    ]
    for ask, message in refusals:
        with pytest.raises((tinker.RequestFailedError, tinker.BadRequestError), match=message) as caught:
            ask().result()
        category = caught.value.body["category"] if isinstance(caught.value, tinker.BadRequestError) else caught.value.category
        assert category == "user"
    assert critic.forward(values(DATA), "value").result().loss_fn_outputs, "it goes on"


def test_what_was_saved_is_listed_and_downloaded(world: World, tmp_path: Path) -> None:
    listed = {each.tinker_path: each for each in world.rest.list_checkpoints(world.run).result().checkpoints}
    assert listed[world.external].checkpoint_type == "external"
    assert listed[world.saved].checkpoint_id == "weights/first" and listed[world.saved].size_bytes > 0
    everything = world.rest.list_user_checkpoints(limit=1000).result()
    assert listed.keys() <= {each.tinker_path for each in everything.checkpoints}
    assert everything.cursor.total_count == len(everything.checkpoints)
    [run] = [each for each in world.rest.list_training_runs().result().training_runs if each.training_run_id == world.run]
    assert (run.base_model, run.lora_rank) == (BASE, 4)
    urls = world.rest.get_external_weights_urls(world.external).result().urls
    import httpx

    with httpx.Client(trust_env=False) as http:
        found = {name: http.get(url) for name, url in urls.items()}
        assert {name: answer.status_code for name, answer in found.items()} == {"model.safetensors": 200}
        [url] = urls.values()
        assert http.get(url.replace("expires=", "expires=1")).status_code == 403


def test_another_key_sees_nothing(world: World) -> None:
    address = world.address
    other = tinker.RestClient(base_url=address, api_key="tml-two")
    assert other.list_user_checkpoints().result().checkpoints == other.list_sessions().result().sessions == []
    assert other.list_checkpoints(world.run).result().checkpoints == []
    for ask in (other.get_training_run, other.get_session):
        with pytest.raises(tinker.NotFoundError):
            ask(world.run if ask == other.get_training_run else world.session).result()
    with pytest.raises(tinker.BadRequestError, match="found none"):
        other.delete_checkpoint_from_tinker_path(world.saved).result()
    stranger = tinker.ServiceClient(base_url=address, api_key="tml-two")
    for start in (
        lambda: stranger.create_training_client_from_state(world.saved),
        lambda: stranger.create_sampling_client(world.saved),
    ):
        with pytest.raises(tinker.BadRequestError):
            start().result()
    stranger.close("success").result()
    shut(other)


def test_a_finished_session_takes_no_more(world: World) -> None:
    address = world.address
    client = tinker.ServiceClient(base_url=address, api_key="tml-one")
    model = client.create_lora_training_client(base_model=BASE, rank=4).result()
    path = model.save_state("kept").result().path
    session = client.holder.get_session_id()
    client.close("success").result()
    import httpx

    with httpx.Client(trust_env=False, headers={"x-api-key": "tml-one"}) as http:
        beat = http.post(f"{address}/api/v1/session_heartbeat", json={"session_id": session})
        new = {"session_id": session, "model_seq_id": 7, "base_model": BASE}
        made = http.post(f"{address}/api/v1/create_model", json=new)
    assert (beat.status_code, made.status_code) == (410, 400)
    assert world.service.create_training_client_from_state(path).result().get_info().lora_rank == 4
