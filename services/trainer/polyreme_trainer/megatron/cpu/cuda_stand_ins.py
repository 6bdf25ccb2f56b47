"""Lets megatron-core, which requests CUDA by name, run in a process without CUDA.

Invariant: importing this module changes nothing. Only a process on the CPU installs the stand-ins, and keeps them until it ends.
"""

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from polyreme_trainer.megatron.mcore import MoEAlltoAllTokenDispatcher


class CudaIsCpu(TorchFunctionMode):
    """Runs calls for device cuda on the CPU. A tensor's `type()` returns the CUDA name that megatron-core compares with."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if kwargs and "device" in kwargs and "cuda" in str(kwargs["device"]):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **(kwargs or {}))


_CUDA_STAND_INS: dict[str, object] = {
    "current_device": lambda: "cpu",
    "synchronize": lambda device=None: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
}


def install_cuda_stand_ins() -> None:
    """Replaces the functions of torch.cuda that megatron-core calls, also in backward passes, until this process ends."""
    for name, stand_in in _CUDA_STAND_INS.items():
        setattr(torch.cuda, name, stand_in)
    # Imported here because a process with CUDA does not need it.
    from polyreme_trainer.megatron.cpu import uneven_parts
    from polyreme_trainer.megatron.mcore import MoEAlltoAllTokenDispatcher, mappings, random_states

    # A recomputed layer saves and restores the generators. There is none of CUDA to restore, and torch would queue each call.
    random_states._get_cuda_rng_state = lambda *arguments, **options: torch.get_rng_state()
    random_states._set_cuda_rng_state = lambda *arguments, **options: None
    mappings._gather_along_first_dim = uneven_parts.gather
    mappings._reduce_scatter_along_first_dim = uneven_parts.reduce_scatter
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "cpu"  # on CUDA, the stream on which it copies its counts of tokens to the CPU
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = _counts_as_lists


def _counts_as_lists(
    dispatcher: "MoEAlltoAllTokenDispatcher", point: str, tokens_per_expert: Tensor | None = None
) -> Tensor | None:
    """Returns how many tokens this expert rank sends and receives, as lists, where megatron-core would copy them to the CPU."""
    if point == dispatcher.cuda_dtoh_point:
        dispatcher.input_splits, dispatcher.output_splits = dispatcher.input_splits.tolist(), dispatcher.output_splits.tolist()
    return tokens_per_expert


def keep_freed_memory() -> None:
    """Makes glibc reuse freed blocks instead of returning them to the kernel.

    Training constantly allocates and frees activations of several MiB. By default each allocation is a new mapping whose pages
    the kernel zeroes at the first access, which takes longer than the arithmetic on them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_max = -1, -4
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
