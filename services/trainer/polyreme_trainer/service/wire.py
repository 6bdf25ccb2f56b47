"""Requests and results as they are in the log, and the SDK's batches in them (SDK 0.38).

A request in the log is one line of JSON, with the key `op`, and after it the body of a batch as the SDK has sent it. A result is
the body of its answer after one byte: J for JSON, P for protobuf.

Invariant: pure. A batch that cannot be computed as it stands is refused, and the message names what is not supported.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from google.protobuf.message import DecodeError

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme_trainer.service.batch import Batch, BatchResult, LossCall
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.losses import SPECS

ARRIVED = "arrived"
"""Field of every request: the Unix time at which the API took it."""
ENDED = "finished"
"""Field of the record of a session that is finished, or a model that is UNLOADED or could not be created: its quota is free."""
UNLOADED = "unloaded"
_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


@dataclass(frozen=True)
class Request:
    """A request as it is in the log.

    Attributes:
        op: what to do, the name of its endpoint.
        fields: its JSON.
        body: of a batch, the SDK's protobuf.
    """

    op: str
    fields: Mapping[str, Any]
    body: bytes = b""

    def pack(self) -> bytes:
        return json.dumps({"op": self.op, **self.fields}, sort_keys=True).encode() + b"\n" + self.body

    @classmethod
    def unpack(cls, payload: bytes) -> "Request":
        head, _, body = payload.partition(b"\n")
        fields = json.loads(head)
        return cls(fields.pop("op"), fields, body)


def parse_batch(body: bytes) -> pb.ForwardBackwardRequest:
    """The message of a batch. Raises TenantError."""
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise TenantError(f"expected a ForwardBackwardRequest in protobuf; found {error}") from None


def read_batch(message: pb.ForwardBackwardRequest) -> LossCall:
    """The arrays of a batch. Raises TenantError."""
    if (loss := SPECS.get(message.loss_fn)) is None:
        raise TenantError(f"not supported: loss_fn = {message.loss_fn!r:.80}; expected one of {', '.join(SPECS)}")
    options = dict(loss.options)
    given = {name: value.number if value.HasField("number") else value.text for name, value in message.loss_fn_config_v2.items()}
    for name, value in (given or dict(message.loss_fn_config)).items():
        if name not in options or not isinstance(value, float):
            raise TenantError(f"not supported: loss_fn_config.{name} = {value!r:.80} of {message.loss_fn}")
        if not math.isfinite(value) or (name in loss.positive and value <= 0):
            above = " above 0" if name in loss.positive else ""
            raise TenantError(f"expected a finite loss_fn_config.{name}{above} of {message.loss_fn}; found {value}")
        options[name] = value
    if not message.data:
        raise TenantError("expected at least one datum; found none")
    if len(message.data) % loss.together:
        raise TenantError(
            f"expected pairs of datums for {message.loss_fn}, the chosen one first; found {len(message.data)} datums"
        )
    inputs, targets, columns = [], [], {name: list[Any]() for name in loss.inputs}
    for number, datum in enumerate(message.data):
        where = f"data[{number}]"
        ids = _tokens(datum.model_input, where)
        given_inputs = {name: _array(tensor, f"{where}.{name}") for name, tensor in datum.loss_fn_inputs.items()}
        has_targets = loss.output == "logprobs"
        wanted = given_inputs.pop("target_tokens", None) if has_targets else np.zeros(len(ids), np.int64)
        if not has_targets and message.forward_only and not given_inputs:  # a client's loss needs the values first
            given_inputs = {name: np.zeros(len(ids), np.float32) for name in loss.inputs}
        if wanted is None:
            raise TenantError(f"expected target_tokens in {where}; found none")
        if wanted.dtype.kind != "i":
            raise TenantError(f"expected int64 or int32 target_tokens in {where}; found {wanted.dtype}")
        if unknown := sorted(given_inputs.keys() - set(loss.inputs)):
            raise TenantError(f"not supported: {where}.{unknown[0]} for {message.loss_fn}; expected {', '.join(loss.inputs)}")
        for name in loss.inputs:
            if name not in given_inputs and name not in loss.optional:
                raise TenantError(f"expected {name} in {where}; found none")
            masked = name == "mask" and "advantages" in loss.inputs
            missing = given_inputs["advantages"] != 0 if masked else np.ones(len(ids))
            columns[name].append(given_inputs.get(name, missing).astype(np.float32))
        for name, array in {"target_tokens": wanted, **given_inputs}.items():
            if array.shape != (len(ids),):
                raise TenantError(f"expected {where}.{name} of shape [{len(ids)}], one for each token; found {list(array.shape)}")
        inputs.append(ids)
        targets.append(wanted.astype(np.int64))
    return LossCall(Batch(inputs, targets, {n: np.concatenate(parts) for n, parts in columns.items()}), message.loss_fn, options)


def _tokens(chunks: Sequence[pb.InputChunk], where: str) -> np.ndarray:
    parts = []
    for chunk in chunks:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise TenantError(f"not supported: {where}.model_input of {kind}; expected encoded_text")
        if len(chunk.encoded_text.tokens) % 4:
            raise TenantError(f"expected int32 tokens in {where}; found {len(chunk.encoded_text.tokens)} bytes")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4").astype(np.int64))
    if not sum(map(len, parts)):
        raise TenantError(f"expected tokens in {where}.model_input; found none")
    return np.concatenate(parts)


def _array(tensor: pb.TensorData, where: str) -> np.ndarray:
    if tensor.WhichOneof("encoding") != "dense":
        raise TenantError(f"not supported: {where} as {tensor.WhichOneof('encoding')}; expected a dense array")
    if (dtype := _DTYPES.get(tensor.dtype)) is None:
        raise TenantError(f"not supported: {where} of dtype {tensor.dtype}; expected float32, int64 or int32")
    try:
        flat = np.frombuffer(tensor.dense, dtype)
        return flat.reshape(list(tensor.shape)) if tensor.shape else flat
    except ValueError as error:
        raise TenantError(f"expected an array in {where}; found {error}") from None


def batch_result(found: BatchResult, name: Literal["logprobs", "values"] = "logprobs") -> bytes:
    """The answer with a batch's result, whose outputs have this name."""
    arrays = [np.asarray(each, "<f4") for each in found.outputs]
    offsets = np.cumsum([0, *(each.nbytes for each in arrays)]).astype("<i8")
    tensor = pb.BatchedTensor(data=b"".join(each.tobytes() for each in arrays), offsets=offsets.tobytes(), dtype=pb.DTYPE_FLOAT32)
    record = pb.ArrayRecord(type_tag=name, num_datums=len(arrays), fields={name: tensor})
    metrics = {"loss:sum": found.loss}
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", loss_fn_outputs=[record], metrics=metrics)
    return b"P" + output.SerializeToString()


def json_result(**fields: object) -> bytes:
    """A result in JSON."""
    return b"J" + json.dumps(fields).encode()


def failure(message: str, category: Literal["user", "server"]) -> bytes:
    """The result of a request that was not executed."""
    return json_result(error=message, category=category)
