"""Groups of gloo that share a device: one thread for all of them, and collectives as before."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from polyreme.process.gloo_device import share_gloo_device

FORK = multiprocessing.get_context("fork")
DEADLINE = 60.0


def device_threads() -> int:
    """The threads of gloo's network devices in this process."""
    return sum("gloo_tcp_loop" in (task / "comm").read_text() for task in Path("/proc/self/task").iterdir())


def rank_of_two(rank: int, folder: Path, shared: bool, answers: Any) -> None:
    if shared:
        share_gloo_device(dist.ProcessGroupGloo)
        share_gloo_device(dist.ProcessGroupGloo)  # a second call changes nothing
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    groups = [dist.new_group([0, 1]) for _ in range(5)] + [dist.new_group([each]) for each in (0, 1)]
    sums = []
    for number, group in enumerate(groups[:5]):
        tensor = torch.full((3,), float(rank + number))
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.tolist())
    threads = device_threads()
    dist.barrier()
    dist.destroy_process_group()
    answers.put((rank, sums, threads))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("interfaces", ["", "lo"])
def test_groups_of_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: bool, interfaces: str) -> None:
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", interfaces)
    answers = FORK.Queue()
    processes = [FORK.Process(target=rank_of_two, args=(rank, tmp_path, shared, answers)) for rank in (0, 1)]
    for process in processes:
        process.start()
    try:
        found = sorted(answers.get(timeout=DEADLINE) for _ in processes)
    finally:
        for process in processes:
            process.join(DEADLINE)
    assert [process.exitcode for process in processes] == [0, 0]
    for _, sums, threads in found:
        assert sums == [[1.0 + 2 * number] * 3 for number in range(5)]
        assert threads == 1 if shared else threads > 5
