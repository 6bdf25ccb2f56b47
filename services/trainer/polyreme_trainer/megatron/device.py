"""The differences between cpu, cuda and npu, except for the kernels, which are in the two model specs.

Invariant: only this module, `build`, which picks the spec, and `optimizer` depend on the kind of device. On CPU, megatron-core
needs `Device.megatron()` while objects are built, because it requests CUDA tensors by name. Training steps run without it,
because it slows every call of torch.
"""

import contextlib
import random
import resource
from typing import Any

import numpy as np
import torch

from polyreme.errors import ConfigError
from polyreme.process.machine import memory_limit
from polyreme_trainer.megatron.cpu.cuda_stand_ins import CudaIsCpu, install_cuda_stand_ins, keep_freed_memory
from polyreme_trainer.megatron.mindspeed import choice, log_choice

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


class Device:
    """One rank's device.

    Args:
        kind: "cpu", "cuda" or "npu".
        local_rank: the number of this process on its host; selects the accelerator.
        threads: the number of compute threads of this rank on CPU.
    """

    def __init__(self, kind: str, local_rank: int = 0, threads: int = 1) -> None:
        if kind == "npu":
            import_npu()
            log_choice(choice())
        if kind != "cpu" and not getattr(torch, kind).is_available():
            raise ConfigError(
                f"a machine with {kind}", f"torch {torch.__version__} sees none", "Set device: cpu, or fix the driver."
            )
        self.kind = kind
        self.backend = _BACKENDS[kind]
        if kind == "cpu":
            self.torch = torch.device("cpu")
            torch.set_num_threads(threads)
            install_cuda_stand_ins()
            keep_freed_memory()
        else:
            self.torch = torch.device(kind, local_rank)
            getattr(torch, kind).set_device(local_rank)

    def seed(self, seed: int) -> None:
        """Seeds python's, numpy's and torch's generators."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    def rng_state(self) -> dict[str, object]:
        """State of all generators, as plain containers and tensors."""
        name, keys, *rest = np.random.get_state(legacy=True)
        numpy_state = (name, np.asarray(keys).tolist(), *rest)
        state: dict[str, object] = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
        if self.kind != "cpu":
            state["device"] = getattr(torch, self.kind).get_rng_state()
        return state

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Restores what `rng_state` returned."""
        name, keys, *rest = state["numpy"]
        random.setstate(state["python"])
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        if self.kind != "cpu":
            getattr(torch, self.kind).set_rng_state(state["device"])

    @property
    def pins(self) -> bool:
        """Whether host memory from which the device copies should be page-locked."""
        return self.kind != "cpu"

    def synchronize(self) -> None:
        """Waits for the device's queued work. Does nothing on CPU."""
        if self.kind != "cpu":
            getattr(torch, self.kind).synchronize()

    def memory(self) -> int:
        """Bytes of memory of the device; on CPU, of the machine or of the container that this process runs in."""
        if self.kind == "cpu":
            return memory_limit()
        _, total = getattr(torch, self.kind).mem_get_info()
        return int(total)

    def free_cached(self) -> int:
        """Frees torch's unused memory. Returns the peak use since the last call, in bytes; on CPU, since the process began."""
        if self.kind == "cpu":
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.synchronize()
        getattr(torch, self.kind).empty_cache()
        peak = int(getattr(torch, self.kind).max_memory_allocated())
        getattr(torch, self.kind).reset_peak_memory_stats()
        return peak

    def megatron(self) -> contextlib.AbstractContextManager[object]:
        """A context in which megatron-core code that names CUDA works on this device. On npu, `transfer_to_npu` does that for the
        whole process."""
        return CudaIsCpu() if self.kind == "cpu" else contextlib.nullcontext()


def import_npu() -> None:
    try:
        import torch_npu  # type: ignore[import-not-found]  # noqa: F401
        from torch_npu.contrib import transfer_to_npu  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        raise ConfigError("torch_npu for device: npu", str(error), "Use the npu image, or set another device.") from None
