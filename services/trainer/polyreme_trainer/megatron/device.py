"""What differs between kinds of machines: cpu, cuda, npu. Nothing else in the trainer asks which one it runs on.

On CPU megatron-core needs `Device.megatron()` where it asks for CUDA tensors outright, which it does while things are built; steps run
without it, because it costs something at every torch call.
"""

import contextlib
import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from polyreme.errors import ConfigError

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


class Device:
    """One rank's device.

    Args:
        kind: "cpu", "cuda" or "npu".
        local_rank: number of this process on its host; picks the accelerator.
        threads: compute threads of this rank on CPU.
    """

    def __init__(self, kind: str, local_rank: int = 0, threads: int = 1) -> None:
        if kind == "npu":
            _import_npu()
        if kind != "cpu" and not getattr(torch, kind).is_available():
            raise ConfigError(
                f"a machine with {kind}", f"torch {torch.__version__} sees none", "Set device: cpu, or mend the driver."
            )
        self.kind = kind
        self.backend = _BACKENDS[kind]
        if kind == "cpu":
            self.torch = torch.device("cpu")
            torch.set_num_threads(threads)
            _answer_for_cuda()
            _keep_freed_memory()
        else:
            self.torch = torch.device(kind, local_rank)
            getattr(torch, kind).set_device(local_rank)

    def seed(self, seed: int) -> None:
        """Seeds python's, numpy's and torch's generators."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, Any]:
        """State of all generators, as plain containers and tensors."""
        name, keys, *rest = np.random.get_state(legacy=True)
        numpy_state = (name, np.asarray(keys).tolist(), *rest)
        state: dict[str, Any] = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
        if self.kind != "cpu":
            state["device"] = getattr(torch, self.kind).get_rng_state()
        return state

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Takes over what `rng_state` gave."""
        name, keys, *rest = state["numpy"]
        random.setstate(state["python"])
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        if self.kind != "cpu":
            getattr(torch, self.kind).set_rng_state(state["device"])

    def synchronize(self) -> None:
        """Waits for the device's queued work; on CPU there is none."""
        if self.kind != "cpu":
            getattr(torch, self.kind).synchronize()

    def megatron(self) -> contextlib.AbstractContextManager[Any]:
        """Context in which megatron-core code that names CUDA works on this device. npu: `transfer_to_npu` has done it for good."""
        return _CudaIsCpu() if self.kind == "cpu" else contextlib.nullcontext()


class _CudaIsCpu(TorchFunctionMode):
    """Calls that ask for device cuda get the CPU; a tensor's `type()` is spelled as megatron-core compares it."""

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


_CUDA_STAND_INS: dict[str, Any] = {
    "current_device": lambda: "cpu",
    "synchronize": lambda device=None: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
}


def _answer_for_cuda() -> None:
    """Gives this process, which uses no CUDA, the few names of torch.cuda that megatron-core calls, for good: backward passes do too."""
    for name, stand_in in _CUDA_STAND_INS.items():
        setattr(torch.cuda, name, stand_in)


def _keep_freed_memory() -> None:
    """Makes glibc reuse freed blocks instead of returning them to the kernel.

    Activations of some MiB are allocated and freed all the time; by default each is a fresh mapping whose pages the kernel zeroes at
    first touch, which takes longer than the arithmetic on them.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        trim_threshold, mmap_max = -1, -4
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def _import_npu() -> None:
    try:
        import torch_npu  # type: ignore[import-not-found]  # noqa: F401
        from torch_npu.contrib import transfer_to_npu  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        raise ConfigError("torch_npu for device: npu", str(error), "Use the npu image, or set another device.") from None
