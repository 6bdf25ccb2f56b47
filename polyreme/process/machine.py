"""The memory and devices of this machine or container."""

import ctypes
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_FIRST_PERSON, _NOBODY = 1000, 60_000
_CGROUPS = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""The file with a control group's limit under cgroup v2 and v1."""
_KILLS = ("memory.events", "memory.oom_control")
"""The file with the number of killed processes under cgroup v2 and v1, in a line `oom_kill N`."""


def control_groups(membership: str, root: Path = _CGROUPS) -> list[Path]:
    """The folders of a process's control groups for memory that are visible here, innermost first.

    Args:
        membership: the content of /proc/PID/cgroup.
    """
    found = []
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = root
        elif "memory" in controllers.split(","):
            base = root / "memory"
        else:
            continue
        # In a container that sees the host's path, or one outside its own, its group is mounted at `base`.
        inner = base if ".." in path.split("/") else base / path.lstrip("/")
        found += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(base) and folder.is_dir()]
    return found


def _own_groups() -> list[Path]:
    with suppress(OSError):
        return control_groups(Path("/proc/self/cgroup").read_text())
    return []


def memory_limit() -> int:
    """Bytes of memory that the processes of this machine or container may use together."""
    paths = [folder / name for folder in _own_groups() for name in _LIMITS]
    texts = []
    for path in paths:
        with suppress(OSError):
            texts.append(path.read_text().strip())
    return limit_of(psutil.virtual_memory().total, texts)


def core_limit() -> int:
    """Processor cores that this process may use at once: at least 1."""
    texts = []
    for folder in _own_groups():
        with suppress(OSError):
            texts.append((folder / "cpu.max").read_text())
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)  # macOS has none
    return cores_of(len(mine), texts)


def thread_environment(threads: int) -> dict[str, str]:
    """The variables by which a process that computes with torch has so many threads.

    A thread without work gives its core to other processes, but not at once: to sleep and to wake in each of a step's small
    operations took a third of its time. So many turns of its loop take a few tenths of a millisecond.
    """
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}


def cores_of(usable: int, quotas: list[str]) -> int:
    """The smallest of the usable cores and the quotas of cgroup v2, "MICROSECONDS PERIOD" or "max PERIOD", rounded down."""
    pairs = [text.split() for text in quotas]
    return max(1, min([usable, *(int(quota) // int(period) for quota, period in pairs if quota.isdigit())]))


@dataclass(frozen=True)
class MemoryKills:
    """The numbers of processes that the kernel has killed for memory so far: in this control group, and on the whole machine."""

    group: int = 0
    machine: int = 0

    @classmethod
    def now(cls) -> "MemoryKills":
        files = (folder / name for folder in _own_groups() for name in _KILLS)
        group = next((count for path in files if (count := _oom_kills(path)) is not None), 0)
        return cls(group, _oom_kills(Path("/proc/vmstat")) or 0)

    def since(self, before: "MemoryKills", limit: int, total: int) -> str:
        """What the kernel has done since `before`; '' when it has killed none.

        Args:
            limit, total: bytes of memory of this container, and of the machine.
        """
        if self.group > before.group:
            return f"the kernel killed {_processes(self.group - before.group)} for memory: the limit is {limit / 2**20:,.0f} MiB"
        if self.machine > before.machine:
            killed = _processes(self.machine - before.machine)
            return f"the kernel killed {killed} of this machine for memory: it has {total / 2**20:,.0f} MiB"
        return ""


def killed_for_memory_since(before: MemoryKills) -> str:
    """`MemoryKills.since` on this machine now."""
    return MemoryKills.now().since(before, memory_limit(), psutil.virtual_memory().total)


def _processes(count: int) -> str:
    return "a process" if count == 1 else f"{count} processes"


def _oom_kills(path: Path) -> int | None:
    with suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def limit_of(total: int, cgroup_limits: list[str]) -> int:
    """The smallest of the machine's memory and the limits of its control group, where "max" means no limit."""
    return min([total, *(int(text) for text in cgroup_limits if text.isdigit())])


def other_users() -> list[int]:
    """The sorted ids of other people who run processes on this machine: users except this process's, root and system accounts."""
    found = set()
    for process in psutil.process_iter(["uids"]):
        if (ids := process.info["uids"]) is not None:
            found.add(int(ids.real))
    return sorted(uid for uid in found - {os.getuid()} if _FIRST_PERSON <= uid < _NOBODY)


def device_count(kind: str, folder: Path = Path("/dev"), environ: Mapping[str, str] = os.environ) -> int:
    """Accelerators of a kind ("cuda" or "npu") whose device files are in `folder` and which this process may use."""
    name, variable = {"cuda": ("nvidia", "CUDA_VISIBLE_DEVICES"), "npu": ("davinci", "ASCEND_RT_VISIBLE_DEVICES")}[kind]
    present = sum(path.name.removeprefix(name).isdigit() for path in folder.glob(f"{name}*"))
    visible = environ.get(variable)
    return present if visible is None else min(present, sum(bool(device.strip()) for device in visible.split(",")))


def cuda_driver_devices() -> int:
    """The number of devices that CUDA's driver reports; 0 without the driver. Creates no context."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return 0
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def has_device(kind: str, folder: Path = Path("/dev"), driver_devices: Callable[[], int] = cuda_driver_devices) -> bool:
    """Whether this process may use an accelerator of a kind, "cuda" or "npu": by its device files in `folder`, or by the driver
    where it has none (WSL)."""
    return device_count(kind, folder) > 0 or (kind == "cuda" and driver_devices() > 0)
