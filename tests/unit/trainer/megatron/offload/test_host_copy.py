"""Copies of tensors inside containers."""

import torch

from polyreme_trainer.megatron.offload.host_copy import copied_to_host, tensors_in


def test_copies_are_equal_own_their_memory_and_hold_nothing_else() -> None:
    buffer = torch.arange(100, dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    content = {"a": {"x": (3, buffer[10:20])}, "b": [parameter, 1.5, None, "text"], "empty": {}}
    copy = copied_to_host(content)
    buffer.zero_()
    with torch.no_grad():
        parameter.zero_()
    assert copy["a"]["x"][0] == 3
    assert torch.equal(copy["a"]["x"][1], torch.arange(10, 20, dtype=torch.bfloat16))
    assert copy["a"]["x"][1].untyped_storage().nbytes() == 20
    assert torch.equal(copy["b"][0], torch.arange(6.0).view(2, 3)) and not copy["b"][0].requires_grad
    assert (copy["b"][1:], copy["empty"]) == ([1.5, None, "text"], {})


def test_every_tensor_is_found() -> None:
    content = {"a": (1, torch.zeros(2)), "b": [{"c": torch.ones(3)}], "d": "text"}
    assert [tensor.numel() for tensor in tensors_in(content)] == [2, 3]
