"""A training service as the engine and the sampler of a program: the verbs of `LocalEngine` and `LocalSampler`, over an address.

Invariant: every call is a numbered request, which is sent again until it has its answer, so a restart of the service is a pause.
A loss is computed here: the service gets its gradient by the log-probabilities as the weights of a cross entropy.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme.config.run import RunConfig
from polyreme.config.trainer import SftPhase
from polyreme.errors import RunFailedError, UnavailableError
from polyreme.process.backoff import Backoff
from polyreme_trainer.algorithms.metrics import Metrics, combine, finish
from polyreme_trainer.algorithms.objective import StageInputs
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.learner.engine import RowsLoss

_AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})
_PAUSE = Backoff(first=0.2, longest=1.0)


@dataclass(frozen=True)
class RemoteAnswer:
    """An answer, as `Sampled` of a local sampler."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_complete: bool


class RemoteService:
    """A model with all parameters on a service, trained and sampled by this program. `open` creates one."""

    CALL_SECONDS = 600.0
    """How long a call is sent again while the service does not answer."""
    TURN_SECONDS = 86400.0
    """How long a call is sent again while the service answers that it, or one before it, waits for its turn."""

    def __init__(self, http: httpx.Client, config: RunConfig, session: str) -> None:
        self._http, self._config, self._session = http, config, session
        self._model, self._weights, self._seq, self._samples = f"{session}:train:0", "", 0, 0
        self._adam: dict[str, float] = {}

    @classmethod
    @contextmanager
    def open(cls, config: RunConfig, address: str, key: str = "") -> Iterator["RemoteService"]:
        """Creates a model of the service's base model, and unloads it with the block.

        Args:
            config: as for `LocalEngine`. Its model must be the service's.
            address: of the service, http://HOST:PORT.
            key: the API key; "": that of the variable TINKER_API_KEY, as for the SDK.

        Raises:
            UnavailableError: the service has not answered for CALL_SECONDS.
            RunFailedError: it refuses a request.
        """
        key = key or os.environ.get("TINKER_API_KEY", "tml-any")
        with httpx.Client(base_url=f"{address}/api/v1", headers={"x-api-key": key}, timeout=60.0, trust_env=False) as http:
            opened = cls(http, config, "")
            session = opened._post("create_session", {"tags": [], "sdk_version": "polyreme"})["session_id"]
            service = cls(http, config, str(session))
            created = service._create()
            try:
                service._result(created)
                yield service
            finally:
                service._post("unload_model", {"model_id": service._model})

    # -- the verbs of an engine

    def begin_phase(self, phase: SftPhase) -> None:
        """Begins with a new optimizer for a supervised phase."""
        self._begin({"beta2": phase.beta2, "weight_decay": phase.weight_decay, "beta1": 0.9, "eps": 1e-8, "grad_clip_norm": 1.0})

    def begin_iterations(self) -> None:
        """Begins with a new optimizer for the iterations."""
        adam = self._config.trainer.optimizer
        settings = {"beta1": adam.beta1, "beta2": adam.beta2, "eps": adam.eps, "weight_decay": adam.weight_decay}
        self._begin({**settings, "grad_clip_norm": adam.clip_grad})

    def forward(self, role: str, rows: StageRows) -> NDArray[np.float32]:
        """As `Engine.forward`. The only role is `actor`."""
        found = self._batch(rows, [mask[1:].astype(np.float32) for mask in rows.loss_mask], forward_only=True)
        return np.concatenate([value * mask[1:] for value, mask in zip(found, rows.loss_mask, strict=True)])

    def forward_backward(self, role: str, rows: StageRows, loss: RowsLoss) -> Sequence[Metrics]:
        """As `Engine.forward_backward`."""
        masks = [mask[1:].astype(bool) for mask in rows.loss_mask]
        logprobs = self._batch(rows, [mask.astype(np.float32) for mask in masks], forward_only=True)
        trained = [value[mask] for value, mask in zip(logprobs, masks, strict=True)]
        output = torch.from_numpy(np.concatenate(trained)).requires_grad_()
        sequence = torch.from_numpy(np.repeat(np.arange(len(trained)), [len(each) for each in trained]))
        columns = {name: torch.from_numpy(values) for name, values in rows.columns.items()}
        total, metrics = loss.objective.loss(StageInputs(output, sequence, len(trained), columns, len(rows), len(output)))
        [gradient] = torch.autograd.grad(total, [output])
        parts = np.split(-gradient.numpy(), np.cumsum([len(each) for each in trained])[:-1])
        weights = []
        for mask, part in zip(masks, parts, strict=True):
            weights.append(np.zeros(len(mask), dtype=np.float32))
            weights[-1][mask] = part
        self._batch(rows, weights, forward_only=False)
        return [metrics]

    def means(self, metrics: Sequence[Metrics]) -> Mapping[str, float]:
        """As `Engine.means`."""
        return finish(combine(metrics))

    def optim_step(self, role: str, lr: float) -> Mapping[str, float]:
        """As `Engine.optim_step`."""
        found = self._request("optim_step", {"adam_params": {**self._adam, "learning_rate": lr}})
        return {"grad_norm": json.loads(found)["metrics"]["grad_norm"], "lr": lr}

    def publish(self, version: int) -> str:
        """Saves the model for `load`. Returns its path."""
        found = self._request("save_weights_for_sampler", {"path": f"version-{version}", "ttl_seconds": 3600, "overwrite": True})
        return str(json.loads(found)["path"])

    # -- the verbs of a sampler

    def load(self, path: str) -> None:
        """Samples from a published version from now on."""
        self._weights = path

    def sample(
        self, prompts: Sequence[Sequence[int]], stop_ids: Sequence[int], temperature: float = 1.0, seed: int = 0
    ) -> list[RemoteAnswer]:
        """As `LocalSampler.sample`."""
        options = {"max_tokens": self._config.rollout.max_new_tokens, "temperature": temperature, "stop": list(stop_ids)}
        asked = []
        for number, prompt in enumerate(prompts):
            chunks = [{"type": "encoded_text", "tokens": list(prompt)}]
            given = {"prompt": {"chunks": chunks}, "sampling_params": {**options, "seed": seed * 2**20 + number}}
            asked.append(self._post("asample", {**given, "num_samples": 1, "model_path": self._weights})["request_id"])
        return [_answer(pb.SampleResponse.FromString(self._result(request))) for request in asked]

    # -- requests

    def _create(self) -> str:
        """Asks for the model. Returns the id of the request."""
        [served] = self._post("get_server_capabilities", None)["supported_models"]
        given = {"session_id": self._session, "model_seq_id": 0, "base_model": served["model_name"], "lora_config": {"rank": 0}}
        return str(self._post("create_model", given)["request_id"])

    def _begin(self, adam: Mapping[str, float]) -> None:
        """Takes Adam's settings, and drops its moments."""
        self._adam = dict(adam)
        path = json.loads(self._request("save_weights", {"path": "phase", "ttl_seconds": 3600, "overwrite": True}))["path"]
        self._request("load_weights", {"path": path, "optimizer": False})

    def _batch(self, rows: StageRows, weights: Sequence[NDArray[np.float32]], forward_only: bool) -> list[NDArray[np.float32]]:
        """The log-probability of each token that follows another one, float32 [L - 1] of each sequence."""
        self._seq += 1
        data = [_datum(ids, each) for ids, each in zip(rows.ids, weights, strict=True)]
        message = pb.ForwardBackwardRequest(
            model_id=self._model, seq_id=self._seq, data=data, loss_fn="cross_entropy", forward_only=forward_only
        )
        found = pb.ForwardBackwardOutput.FromString(self._result(self._post("forward_backward", message)["request_id"]))
        tensor = found.loss_fn_outputs[0].fields["logprobs"]
        values, offsets = np.frombuffer(tensor.data, "<f4"), np.frombuffer(tensor.offsets, "<i8") // 4
        return [values[start:end] for start, end in pairwise(offsets)]

    def _request(self, endpoint: str, fields: Mapping[str, object]) -> bytes:
        """The result of the model's next request."""
        self._seq += 1
        return self._result(self._post(endpoint, {"model_id": self._model, "seq_id": self._seq, **fields})["request_id"])

    def _result(self, request: str) -> bytes:
        found = self._send("retrieve_future", {"request_id": request})
        if found.headers["content-type"] == "application/json" and "error" in (tree := found.json()):
            raise RunFailedError(f"a result of request {request}", tree["error"], "See the service's log.")
        return found.content

    def _post(self, endpoint: str, content: Mapping[str, object] | pb.ForwardBackwardRequest | None) -> Any:
        return self._send(endpoint, content).json()

    def _send(self, endpoint: str, content: Mapping[str, object] | pb.ForwardBackwardRequest | None) -> httpx.Response:
        """The answer to a request, which is sent again until there is one. None: a GET."""
        began = heard = time.monotonic()
        attempt = 0
        while True:
            problem = "no answer"
            try:
                if isinstance(content, pb.ForwardBackwardRequest):
                    answer = self._http.post(f"/{endpoint}", content=content.SerializeToString())
                else:
                    answer = self._http.get(f"/{endpoint}") if content is None else self._http.post(f"/{endpoint}", json=content)
                if answer.is_success:
                    return answer
                problem = answer.text
                if answer.status_code in (408, 429):
                    heard = time.monotonic()
                if answer.status_code not in _AGAIN:
                    raise RunFailedError(f"an answer to {endpoint}", f"{answer.status_code} {problem}", "Correct the request.")
            except httpx.TransportError as error:
                problem = repr(error)
            if time.monotonic() > min(heard + self.CALL_SECONDS, began + self.TURN_SECONDS):
                raise UnavailableError(f"an answer of {self._http.base_url} to {endpoint}", problem, "Start it, or see its log.")
            attempt += 1
            time.sleep(_PAUSE.draw(attempt))


def _datum(ids: NDArray[np.int32], weights: NDArray[np.float32]) -> pb.Datum:
    chunk = pb.InputChunk(encoded_text=pb.EncodedText(tokens=ids[:-1].astype("<i4").tobytes()))
    targets = pb.TensorData(dense=ids[1:].astype("<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[len(weights)])
    given = pb.TensorData(dense=weights.astype("<f4").tobytes(), dtype=pb.DTYPE_FLOAT32, shape=[len(weights)])
    return pb.Datum(model_input=[chunk], loss_fn_inputs={"target_tokens": targets, "weights": given})


def _answer(response: pb.SampleResponse) -> RemoteAnswer:
    [found] = response.sequences
    ids, logprobs = np.frombuffer(found.tokens, "<i4").tolist(), np.frombuffer(found.logprobs, "<f4").tolist()
    return RemoteAnswer(tuple(ids), tuple(logprobs), found.stop_reason == pb.STOP_REASON_STOP)
