"""The peaks of torch's allocator while a learner works, told apart by place and by phase of the training.

Invariant: the peaks are replayed from the profiler's events. Every block counts from its allocation to its release, at one place: the host, if
`Offload` allocated it for what leaves the device, otherwise the device. Mapped files do not count.
"""

import functools
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

TO_HOST = "to host"
STEP = "optimizer step"


def tensor_peaks(work: Callable[[], None], trace: Path, mapped: Collection[int]) -> dict[str, int]:
    """Returns the peaks in bytes: `device`, `host`, `both` together, and of the device in each phase: `ROLE`, `ROLE optimizer step`
    and `ROLE copy`.

    On CPU, device and host are the same memory. The phase `ROLE` is that of the micro-batches of the role's steps; in `ROLE copy`, it takes the
    actor's weights.

    Args:
        trace: the file for the profiler's events.
        mapped: the sizes of the files that `work` maps. The profiler reports their mappings like blocks.
    """
    from torch.profiler import ProfilerActivity, profile

    with annotated(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    profiler.export_chrome_trace(str(trace))
    return replay(json.loads(trace.read_text())["traceEvents"], mapped)


@contextmanager
def annotated() -> Iterator[None]:
    """Within the block, the trace names the phases and the moves to the host."""
    from polyreme_trainer.megatron.models.critic import Critic
    from polyreme_trainer.megatron.offload.offload import Offload
    from polyreme_trainer.megatron.training import followers
    from polyreme_trainer.megatron.training.optimizer import Optimizer
    from polyreme_trainer.megatron.training.roles import Role

    average = _named(followers.move_average, lambda _: "phase moving average copy")
    with (
        mock.patch.object(followers, "move_average", average),
        mock.patch.object(Critic, "copy_backbone", _named(Critic.copy_backbone, lambda _: "phase critic copy")),
        mock.patch.object(Role, "forward_backward", _named(Role.forward_backward, lambda role: f"phase {role.name}")),
        mock.patch.object(Role, "optim_step", _named(Role.optim_step, lambda role: f"phase {role.name}")),
        mock.patch.object(Optimizer, "step", _named(Optimizer.step, lambda _: STEP)),
        mock.patch.object(Offload, "__init__", _named(Offload.__init__, lambda _: TO_HOST)),
    ):
        yield


def _named(method: Callable[..., Any], name: Callable[[Any], str]) -> Callable[..., Any]:
    """The method, named in the trace by its first argument."""
    from torch.profiler import record_function

    @functools.wraps(method)
    def named(self: Any, *args: Any, **options: Any) -> Any:
        with record_function(name(self)):
            return method(self, *args, **options)

    return named


def replay(events: list[dict[str, Any]], mapped: Collection[int]) -> dict[str, int]:
    """Returns the peaks of a trace, see `tensor_peaks`.

    The profiler misses blocks that gloo's threads free, so its own total drifts upwards. A block that is allocated again was freed before.
    """
    marks: list[tuple[float, int, dict[str, Any]]] = []  # begin before, and end after the allocations of the same time
    for event in events:
        name = event.get("name", "")
        if name == "[memory]" and abs(event["args"]["Bytes"]) not in mapped:
            marks.append((float(event["ts"]), 1, event))
        elif event.get("cat") == "user_annotation" and (name in (TO_HOST, STEP) or name.startswith("phase ")):
            began = float(event["ts"])
            marks += [(began, 0, event), (began + float(event["dur"]), 2, event)]
    open_names: list[str] = []
    alive: dict[int, tuple[str, int]] = {}
    totals, peaks = {"device": 0, "host": 0}, {"device": 0, "host": 0, "both": 0}
    for _, kind, event in sorted(marks, key=lambda mark: mark[:2]):
        if kind == 2:
            open_names.remove(event["name"])
            continue
        if kind == 0:  # a phase that allocates nothing has a peak too
            open_names.append(event["name"])
        else:
            address, change = event["args"]["Addr"], event["args"]["Bytes"]
            place, nbytes = alive.pop(address, ("device", 0))
            totals[place] -= nbytes
            if change > 0:
                place = "host" if TO_HOST in open_names else "device"
                alive[address] = place, change
                totals[place] += change
        now = {**totals, "both": sum(totals.values())}
        if phase := next((name.removeprefix("phase ") for name in open_names if name.startswith("phase ")), ""):
            now[f"{phase} {STEP}" if STEP in open_names else phase] = totals["device"]
        for name, nbytes in now.items():
            peaks[name] = max(peaks.get(name, 0), nbytes)
    return peaks
