"""Batches and messages of the Tinker API as they are read, and what is refused by name."""

import json
from typing import Any

import numpy as np
import pytest

from polyreme.api.v1 import tinker_pb2 as pb
from polyreme_trainer.service import messages as m
from polyreme_trainer.service.batch import BatchResult
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.wire import Request, batch_result, parse_batch, read_batch


def tensor(values: Any, dtype: Any = np.float32, name: Any = pb.DTYPE_FLOAT32) -> pb.TensorData:
    array = np.asarray(values, dtype)
    return pb.TensorData(dense=array.tobytes(), dtype=name, shape=array.shape)


def message(loss: str = "cross_entropy", **inputs: pb.TensorData) -> pb.ForwardBackwardRequest:
    """Two chunks of a sequence of three tokens."""
    chunks = [pb.InputChunk(encoded_text=pb.EncodedText(tokens=np.array(ids, "<i4").tobytes())) for ids in ([5, 6], [7])]
    targets = tensor([6, 7, 8], np.int64, pb.DTYPE_INT64)
    datum = pb.Datum(model_input=chunks, loss_fn_inputs={"target_tokens": targets, **inputs})
    return pb.ForwardBackwardRequest(model_id="x", seq_id=1, data=[datum, datum], loss_fn=loss)


def test_a_batch_is_read_as_arrays() -> None:
    given = message("ppo", logprobs=tensor([-1, -2, -3]), advantages=tensor([0, 1, 2]))
    given.loss_fn_config["clip_low_threshold"] = 0.5
    call = read_batch(parse_batch(given.SerializeToString()))
    assert [ids.tolist() for ids in call.batch.inputs] == [[5, 6, 7]] * 2
    assert [ids.tolist() for ids in call.batch.targets] == [[6, 7, 8]] * 2
    assert call.batch.columns["advantages"].tolist() == [0, 1, 2] * 2
    assert (call.loss, call.options) == ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.2})


def test_missing_weights_are_one() -> None:
    assert read_batch(message()).batch.columns["weights"].tolist() == [1.0] * 6


def refusal(given: pb.ForwardBackwardRequest) -> str:
    with pytest.raises(TenantError) as caught:
        read_batch(given)
    return str(caught.value)


def test_what_a_batch_cannot_have_is_refused_by_name() -> None:
    assert "loss_fn = 'stable_reinforce'" in refusal(message("stable_reinforce"))
    assert "expected logprobs" in refusal(message("ppo"))
    assert "data[0].mask" in refusal(message(mask=tensor([1, 1, 1])))
    assert "of shape [3]" in refusal(message(weights=tensor([1, 1])))
    assert "sparse_csr" in refusal(message(weights=pb.TensorData(sparse_csr=pb.SparseCsr(), dtype=pb.DTYPE_FLOAT32)))
    assert "of dtype 4" in refusal(message(weights=tensor([1, 1, 1], np.int16, pb.DTYPE_BFLOAT16)))
    image = message()
    image.data[1].model_input.append(pb.InputChunk(image=b"png"))
    assert "model_input of image" in refusal(image)
    strange = message()
    strange.loss_fn_config["temperature"] = 2.0
    assert "loss_fn_config.temperature" in refusal(strange)
    assert "at least one datum" in refusal(pb.ForwardBackwardRequest(loss_fn="cross_entropy"))


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(TenantError, match="protobuf"):
        parse_batch(b"\xff\xff\xff")


def test_a_result_has_an_array_for_each_sequence() -> None:
    result = batch_result(BatchResult([np.array([-1, -2], np.float32), np.array([-3], np.float32)], 6.0))
    output = pb.ForwardBackwardOutput.FromString(result[1:])
    field = output.loss_fn_outputs[0].fields["logprobs"]
    assert (result[:1], dict(output.metrics)) == (b"P", {"loss:sum": 6.0})
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 8, 12]
    assert np.frombuffer(field.data, "<f4").tolist() == [-1, -2, -3]


def test_a_request_keeps_its_body_in_the_log() -> None:
    request = Request("forward", {"a": 1}, b"\n\x00x")
    assert Request.unpack(request.pack()) == request


def test_json_is_read_without_its_nulls() -> None:
    body = json.dumps(
        {"model_id": "m", "seq_id": 2, "adam_params": {"learning_rate": 0.5, "type": None}, "optimizer_params": None}
    )
    settings = m.read(m.OptimStep, body.encode()).settings
    assert (settings.learning_rate, settings.beta1, settings.eps) == (0.5, 0.9, 1e-12)


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        (m.OptimStep, {"model_id": "m", "seq_id": 1, "muon": {}}, "not supported: muon"),
        (m.Sample, {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, "topk_sample_logprobs": 3}, "topk_sample_logprobs"),
        (m.Sample, {"prompt": {"chunks": [{"type": "image", "tokens": [1]}]}, "sampling_params": {}}, "prompt.chunks.0.type"),
        (m.OptimStep, {"model_id": "m", "seq_id": 0}, "seq_id"),
        (m.OptimStep, {"model_id": "m", "seq_id": 1, "adam_params": {"learning_rate": None}}, "learning_rate: expected a finite number"),
        (m.OfModel, [], "JSON object"),
    ],
)  # fmt: skip
def test_json_that_is_not_supported_is_refused(kind: type[m.Message], fields: Any, named: str) -> None:
    with pytest.raises(TenantError) as caught:
        m.read(kind, json.dumps(fields).encode())
    assert named in str(caught.value)


def test_paths_name_a_model_a_kind_and_a_name() -> None:
    path = f"tinker://{'0' * 32}:train:3/weights/step-1"
    assert str(m.read_path(path)) == path
    for wrong in ("weights/x", path + "/../x", path.replace("step-1", "..")):
        with pytest.raises(TenantError):
            m.read_path(wrong)


def test_a_missing_mask_has_the_tokens_with_an_advantage() -> None:
    given = message("gspo", logprobs=tensor([0, -2, -3]), advantages=tensor([0, 1, 2]))
    assert read_batch(given).batch.columns["mask"].tolist() == [0, 1, 1] * 2


def test_values_are_asked_for_before_there_is_a_loss() -> None:
    """A `forward` needs no inputs, and its loss is 0 then. A gradient needs them, and a value has no target."""
    given = message("value", returns=tensor([1, 2, 3]), values=tensor([0, 0, 1]))
    assert "data[0].target_tokens for value" in refusal(given)
    for datum in given.data:
        del datum.loss_fn_inputs["target_tokens"]
    call = read_batch(given)
    assert call.batch.columns["mask"].tolist() == [1.0] * 6 and call.options == {"value_clip": 0.5}
    for datum in given.data:
        datum.loss_fn_inputs.clear()
    assert "expected returns" in refusal(given)
    given.forward_only = True
    assert {name: column.tolist() for name, column in read_batch(given).batch.columns.items()} == dict.fromkeys(
        ("returns", "values", "mask"), [0.0] * 6
    )


def test_pairs_come_whole() -> None:
    given = message("dpo", reference_logprobs=tensor([-1, -2, -3]))
    assert read_batch(given).options == {"beta": 0.1, "label_smoothing": 0.0}
    del given.data[1]
    assert "expected pairs" in refusal(given)
