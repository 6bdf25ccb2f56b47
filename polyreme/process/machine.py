"""The memory and devices of this machine or container.

Invariant: reading changes nothing.
"""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The files with the container's limit under cgroup v2 and v1."""


def memory_limit() -> int:
    """Bytes of memory that the processes of this machine or container may use together."""
    texts = [path.read_text().strip() for path in _CGROUP_LIMITS if path.is_file()]
    return limit_of(psutil.virtual_memory().total, texts)


def limit_of(total: int, cgroup_limits: list[str]) -> int:
    """The smallest of the machine's memory and the limits of its control group, where "max" means no limit."""
    return min([total, *(int(text) for text in cgroup_limits if text.isdigit())])


def device_count(kind: str, folder: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> int:
    """Accelerators of a kind ("cuda" or "npu") whose device files are in `folder` and which this process may use."""
    name, variable = {"cuda": ("nvidia", "CUDA_VISIBLE_DEVICES"), "npu": ("davinci", "ASCEND_RT_VISIBLE_DEVICES")}[kind]
    present = sum(path.name.removeprefix(name).isdigit() for path in folder.glob(f"{name}*"))
    visible = environ.get(variable)
    return present if visible is None else min(present, sum(bool(device.strip()) for device in visible.split(",")))


def has_device(kind: str) -> bool:
    """Whether this process may use an accelerator of a kind, "cuda" or "npu": by its device files, or by the driver where it has none (WSL)."""
    return device_count(kind) > 0 or (kind == "cuda" and _driver_devices() > 0)


def _driver_devices() -> int:
    """The number of devices that CUDA's driver reports; 0 without the driver. Creates no context."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return 0
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value
