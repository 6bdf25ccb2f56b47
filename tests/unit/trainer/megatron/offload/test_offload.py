import torch

from polyreme_trainer.megatron.offload.offload import Offload


def test_views_survive_and_what_was_dropped_is_zero() -> None:
    """The test has a flat buffer of weights with two parameters, as in the distributed optimizer, and one of gradients."""
    buffer, gradients, alone = torch.arange(12.0), torch.ones(12), torch.arange(3, dtype=torch.bfloat16)
    first, second = torch.nn.Parameter(buffer[:8].view(2, 4)), buffer[8:]
    grad = gradients[8:]
    offload = Offload([first, second, buffer, alone], [gradients, grad], pin=False)
    assert offload.nbytes == 12 * 4 * 2 + 3 * 2
    assert [tensor.untyped_storage().nbytes() for tensor in (buffer, first, gradients, alone)] == [0, 0, 0, 0]
    offload.restore()
    assert torch.equal(first.detach(), torch.arange(8.0).view(2, 4))
    assert torch.equal(alone, torch.arange(3, dtype=torch.bfloat16))
    assert not gradients.any()
    buffer += 1  # the views still share its memory
    assert second.tolist() == [9, 10, 11, 12] and first[0, 0] == 1
    gradients[8] = 5
    assert grad[0] == 5


def test_what_is_kept_is_not_dropped() -> None:
    buffer = torch.arange(4.0)
    Offload([buffer[:2]], [buffer[2:]], pin=False).restore()
    assert buffer.tolist() == [0, 1, 2, 3]


def test_a_second_restore_changes_nothing() -> None:
    tensor = torch.ones(2)
    offload = Offload([tensor], [], pin=False)
    offload.restore()
    tensor += 1
    offload.restore()
    assert tensor.tolist() == [2, 2]


def test_tensors_without_memory_are_left_alone() -> None:
    assert Offload([torch.empty(0)], [torch.empty(0)], pin=False).nbytes == 0
