from pathlib import Path
from typing import Any

import pytest

from polyreme.config.run import RunConfig
from polyreme_trainer.memory.placement import advice, devices_needed
from support.configs import run_config


def config(folder: Path, placement: str = "separate", **changes: Any) -> RunConfig:
    """Two learner ranks, and two replicas of one device each."""
    base = run_config(folder, device="cuda", placement=placement, **changes)
    parallel = base.trainer.parallel.model_copy(update={"tensor": 2})
    trainer, rollout = base.trainer.model_copy(update={"parallel": parallel}), base.rollout.model_copy(update={"replicas": 2})
    return base.model_copy(update={"trainer": trainer, "rollout": rollout})


def test_shared_devices_are_needed_once(tmp_path: Path) -> None:
    found = [devices_needed(config(tmp_path), placement) for placement in ("separate", "colocated")]
    assert found == [4, 2]


@pytest.mark.parametrize("devices", [2, 3])
def test_a_machine_with_few_devices_is_advised_to_share_them(tmp_path: Path, devices: int) -> None:
    [notice] = advice(config(tmp_path), devices)
    assert "placement: colocated" in notice and f"has {devices} " in notice
    assert not list(advice(config(tmp_path, "colocated"), devices))


def test_a_machine_with_enough_devices_is_advised_to_part_them(tmp_path: Path) -> None:
    assert not list(advice(config(tmp_path), 4))
    [notice] = advice(config(tmp_path, "colocated"), 4)
    assert "placement: separate" in notice


def test_one_device_is_too_few_for_either(tmp_path: Path) -> None:
    for placement, needed in (("separate", 4), ("colocated", 2)):
        [notice] = advice(config(tmp_path, placement), 1)
        assert notice.endswith(f"placement: {placement} needs {needed}")


def test_cpu_and_unknown_devices_get_no_advice(tmp_path: Path) -> None:
    assert not list(advice(config(tmp_path), 0))
    assert not list(advice(config(tmp_path).model_copy(update={"device": "cpu"}), 1))


def test_devices_on_all_machines_count_and_one_machine_gives_no_advice(tmp_path: Path) -> None:
    base = config(tmp_path)
    parallel = base.trainer.parallel.model_copy(update={"data": 2, "nodes": 2})
    several = base.model_copy(update={"trainer": base.trainer.model_copy(update={"parallel": parallel})})
    assert [devices_needed(several, placement) for placement in ("separate", "colocated")] == [6, 4]
    assert not list(advice(several, 2))
