"""Resource metrics of a service: its process tree, and NVIDIA devices where their library is installed.

Invariant: nothing is measured between two scrapes. Other devices have their own exporters (docs/ascend.md).
"""

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from types import ModuleType

import psutil  # type: ignore[import-untyped]
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Usage(Collector):
    """Processor time and memory of a process and its children; utilization and memory of its devices. `pid`: None: this one."""

    def __init__(self, pid: int | None = None) -> None:
        self._process, self._nvml = psutil.Process(pid), _nvml()

    def collect(self) -> Iterator[Metric]:
        seconds, memory = process_tree(self._process)
        yield CounterMetricFamily("polyreme_cpu_seconds", "Processor seconds of the service's living processes.", value=seconds)
        yield GaugeMetricFamily("polyreme_memory_bytes", "Resident memory of the service's processes.", value=memory)
        if self._nvml is not None:
            yield from _devices(self._nvml)


def process_tree(process: psutil.Process | None = None) -> tuple[float, float]:
    """(processor seconds, resident bytes) of a process (default: this one) and its live children; seconds also of reaped ones."""
    process = process or psutil.Process()
    times = process.cpu_times()
    seconds, memory = times.user + times.system + times.children_user + times.children_system, float(process.memory_info().rss)
    for child in process.children(recursive=True):
        with suppress(psutil.Error):  # it has exited
            times = child.cpu_times()
            seconds += times.user + times.system
            memory += child.memory_info().rss
    return seconds, memory


def private_bytes_of_children() -> int:
    """Memory in bytes that only the live children of this process have, which their end frees."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has exited
            total += child.memory_full_info().uss
    return total


def _nvml() -> ModuleType | None:
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # the library without a driver
        return None
    return nvml


def _devices(nvml: ModuleType) -> Iterator[Metric]:
    labels = ["device", "uuid"]
    busy = GaugeMetricFamily("polyreme_device_busy_ratio", "Share of time that kernels ran.", labels=labels)
    used = GaugeMetricFamily("polyreme_device_memory_bytes", "Device memory in use.", labels=labels)
    for index in range(nvml.nvmlDeviceGetCount()):
        with suppress(nvml.NVMLError):  # not every device supports every query, and one may be lost
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            names = [str(index), nvml.nvmlDeviceGetUUID(handle)]
            busy.add_metric(names, nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
            used.add_metric(names, nvml.nvmlDeviceGetMemoryInfo(handle).used)
    yield busy
    yield used
