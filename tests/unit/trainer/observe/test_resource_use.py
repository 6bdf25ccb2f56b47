"""The use of processors, memory and devices between two records, from the metrics of the run's services."""

import os
from typing import Any

import pytest
from metric_rows import STAGE_METRICS, find
from prometheus_client.samples import Sample

from polyreme.experience.metric_records import Resumed, StageStep
from polyreme_trainer.observe.resource_use import INTERVAL, ResourceUse, StageUse


def measured(cpu: float, memory: float, **busy: float) -> list[Sample]:
    """The samples of a service, with devices by their UUIDs; each has 100 bytes in use."""
    devices = [
        Sample(name, {"device": "0", "uuid": uuid}, value)
        for uuid, share in busy.items()
        for name, value in (("polyreme_device_busy_ratio", share), ("polyreme_device_memory_bytes", 100.0))
    ]
    return [Sample("polyreme_cpu_seconds_total", {}, cpu), Sample("polyreme_memory_bytes", {}, memory), *devices]


def test_cores_are_means_and_memory_is_the_largest() -> None:
    use = ResourceUse()
    for at, cpu, memory in ((0.0, 50.0, 10.0), (10.0, 60.0, 30.0), (20.0, 90.0, 20.0)):
        use.add({("trainer", ""): (at, measured(cpu, memory))})
    assert use.take() == {"resources/trainer/cores": 2.0, "resources/trainer/memory_bytes": 30.0}
    assert use.take() == {}
    use.add({("trainer", ""): (30.0, measured(95.0, 5.0))})
    assert use.take() == {"resources/trainer/cores": 0.5, "resources/trainer/memory_bytes": 5.0}


def test_servers_of_a_role_are_added_up() -> None:
    use = ResourceUse()
    use.add({("rollout", "a"): (0.0, measured(0, 1)), ("rollout", "b"): (0.0, measured(0, 2))})
    use.add({("rollout", "a"): (10.0, measured(10, 1)), ("rollout", "b"): (10.0, measured(5, 2))})
    assert use.take() == {"resources/rollout/cores": 1.5, "resources/rollout/memory_bytes": 3}


def test_a_restarted_service_has_no_cores_at_first() -> None:
    use = ResourceUse()
    for at, name, cpu in ((0.0, "a", 90.0), (10.0, "a", 5.0), (20.0, "b", 40.0)):
        use.add({("reward", name): (at, measured(cpu, 1))})
    assert use.take() == {"resources/reward/memory_bytes": 1}


def test_a_device_that_several_services_see_counts_once() -> None:
    use = ResourceUse()
    seen = measured(0, 1, **{"GPU-1": 0.5, "GPU-2": 1.0})
    use.add({("rollout", "a"): (0.0, seen), ("rollout", "b"): (0.0, seen), ("trainer", ""): (0.0, seen)})
    found = use.take()
    assert found["resources/device_busy_fraction"] == pytest.approx(0.75)
    assert found["resources/device_memory_bytes"] == 200
    assert all(find(name) for name in found)


def test_the_first_iteration_of_a_batch_has_the_metrics() -> None:
    use = ResourceUse()
    use.add({("trainer", ""): (0.0, measured(0, 7))})
    first, second = ({"kind": "iteration", "iteration": number} for number in (1, 2))
    records: list[tuple[str, dict[str, Any]]] = [("1-0", {"kind": "notice"}), ("2-0", first), ("3-0", second)]
    assert use.added(records) == [records[0], ("2-0", first | {"resources/trainer/memory_bytes": 7}), records[2]]


def test_a_step_of_a_stage_has_what_its_processes_used() -> None:
    now = [100.0]
    use = StageUse(os.getpid(), lambda: now[0])

    def step(number: int) -> dict[str, Any]:
        record = use.added(StageStep(step=number, steps=9, metrics={"loss": 0.5}))
        assert isinstance(record, StageStep) and record.metrics["loss"] == 0.5
        return {name: value for name, value in record.metrics.items() if name.startswith("resources/")}

    assert use.added(Resumed(step=3)) == Resumed(step=3)
    assert step(1)["resources/trainer/memory_bytes"] > 1e6
    now[0] += INTERVAL / 2
    assert step(2) == {}
    now[0] += INTERVAL / 2
    later = step(3)
    assert later["resources/trainer/cores"] >= 0
    assert {name for name in later if "device" not in name} <= {metric.name for metric in STAGE_METRICS}
