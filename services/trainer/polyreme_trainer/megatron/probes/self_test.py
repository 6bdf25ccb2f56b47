"""A process of `polyreme doctor`: reports the devices that torch sees, or takes part in one collective on a device.

Invariant: the last line of standard output is one JSON object. After a failure the exit code is not 0.
"""

import importlib
import json
import os
import sys
from importlib.util import find_spec

import torch
import torch.distributed as dist

from polyreme.net.torch_store import narrow_stores
from polyreme_trainer.megatron.device import Device, import_npu
from polyreme_trainer.megatron.mindspeed import DEVICE

_NUMBERS = 2**20


def facts() -> dict[str, object]:
    """torch's version and the accelerators that it sees: names by kind."""
    npu = []
    if find_spec("torch_npu") is not None:
        import_npu()
        npu = [torch.npu.get_device_name(index) for index in range(torch.npu.device_count())]  # type: ignore[attr-defined]
    return {
        "torch": torch.__version__,
        "cuda_build": torch.version.cuda,
        "cuda": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "npu": npu,
    }


def reduce_once(kind: str) -> dict[str, object]:
    """Sums 4 MiB over all processes, each on its own device, after the imports of a learner's rank.

    Raises RuntimeError for a wrong sum or a failed collective.
    """
    os.environ[DEVICE] = kind
    importlib.import_module("polyreme_trainer.megatron.mcore")  # on npu also MindSpeed's adaptor, if it is used
    device = Device(kind, int(os.environ["LOCAL_RANK"]))
    narrow_stores(importlib.import_module("torch.distributed.rendezvous"))
    dist.init_process_group(device.backend)
    numbers = torch.full((_NUMBERS,), float(dist.get_rank() + 1), device=device.torch)
    dist.all_reduce(numbers)
    device.synchronize()
    ranks = dist.get_world_size()
    expected = ranks * (ranks + 1) / 2
    if not bool((numbers == expected).all()):
        raise RuntimeError(f"expected sums of {expected}; found {numbers.min().item()} to {numbers.max().item()}")
    dist.destroy_process_group()
    return {"backend": device.backend, "ranks": ranks}


if __name__ == "__main__":
    print(json.dumps(facts() if sys.argv[1] == "facts" else reduce_once(sys.argv[1])))
