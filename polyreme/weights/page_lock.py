"""Page-locks shared memory, so that CUDA devices copy at the speed of their bus, several times as fast.

Invariant: a refusal costs time and nothing else; it is logged.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import ModuleType

import numpy as np

logger = logging.getLogger(__name__)

_READ_ONLY = 8  # cudaHostRegisterReadOnly


def page_lock(memory: memoryview, torch: ModuleType) -> Callable[[], object] | None:
    """Page-locks `memory` for the CUDA devices of this process. Returns what undoes it; None: CUDA refused."""
    whole = np.frombuffer(memory, np.uint8)
    runtime, flags = torch.cuda.cudart(), _READ_ONLY if memory.readonly else 0
    if code := int(runtime.cudaHostRegister(whole.ctypes.data, whole.nbytes, flags)):
        logger.warning("the arena of weights stays pageable, and copies to and from the device are slower: CUDA error %d", code)
        with suppress(RuntimeError):  # CUDA reports the error once more, to the next kernel
            torch.zeros(1, device="cuda")
        return None
    return partial(runtime.cudaHostUnregister, whole.ctypes.data)
