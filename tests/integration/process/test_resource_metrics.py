"""The resource metrics of a service include its live child processes."""

import subprocess
import sys

import psutil

from polyreme.process.resource_metrics import Usage, private_bytes_of_children, process_tree
from support.waiting import wait_until


def test_children_count_too() -> None:
    seconds, memory = process_tree()
    busy = "import time; block = bytearray(64 << 20); began = time.process_time()\nwhile time.process_time() < began + 0.3: pass\ntime.sleep(3600)"
    with subprocess.Popen([sys.executable, "-c", busy]) as child:
        wait_until(lambda: sum(psutil.Process(child.pid).cpu_times()[:2]) >= 0.3)
        more_seconds, more_memory = process_tree()
        private = private_bytes_of_children()
        child.kill()
    assert more_seconds >= seconds + 0.3
    assert more_memory >= memory + (60 << 20)
    assert private >= 60 << 20 and private_bytes_of_children() <= private - (60 << 20)


def test_names_and_units() -> None:
    found = {metric.name: metric for metric in Usage().collect()}
    assert found["polyreme_cpu_seconds"].samples[0].name == "polyreme_cpu_seconds_total"
    assert found["polyreme_memory_bytes"].samples[0].value > 1 << 20
