"""Foreign variables do not reach the engine; what the user names does."""

from pathlib import Path

import pytest

from polyreme.errors import ConfigError
from polyreme_rollout.engine.vllm_environment import PASSED, check_sleep, engine_environment, foreign
from support.configs import run_config

LINKS = {
    "VLLM_PORT": "tcp://10.0.0.7:8000",
    "VLLM_SERVICE_HOST": "10.0.0.7",
    "VLLM_PORT_8000_TCP": "tcp://10.0.0.7:8000",
    "RAY_ADDRESS": "ray://elsewhere",
}
OUTER_JOB = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "elsewhere",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "LOCAL_RANK": "3",
}
USUAL = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1", "POLYREME_TOKEN": "x", "NCCL_DEBUG": "INFO", "HF_HOME": "/models"}


@pytest.mark.parametrize("foreigners", [LINKS, OUTER_JOB, {"VLLM_WHATEVER_COMES_NEXT": "1"}, {"VLLM_HOST_IP": "10.0.0.7"}])
def test_what_others_set_is_not_passed(tmp_path: Path, foreigners: dict[str, str]) -> None:
    environ = {**USUAL, **foreigners}
    found = engine_environment(run_config(tmp_path), environ, "127.0.0.1", "lo")
    assert foreign(environ) == sorted(foreigners)
    assert not {name for name in foreigners if found.get(name) == foreigners[name]}
    assert {name: found[name] for name in USUAL} == USUAL


def test_what_the_user_names_is_passed_and_ours_goes_first(tmp_path: Path) -> None:
    environ = {PASSED: "VLLM_ATTENTION_BACKEND, VLLM_LOGGING_LEVEL,VLLM_NO_USAGE_STATS", "VLLM_ATTENTION_BACKEND": "FLASHINFER",
               "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_NO_USAGE_STATS": "0"}  # fmt: skip
    found = engine_environment(run_config(tmp_path), environ, "::1", "lo0")
    names = ("VLLM_ATTENTION_BACKEND", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_HOST_IP", "GLOO_SOCKET_IFNAME")
    assert [found[name] for name in names] == ["FLASHINFER", "DEBUG", "1", "::1", "lo0"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: true"),
        ("PYTORCH_NPU_ALLOC_CONF", "page_size:1g,expandable_segments:True"),
    ],
)
def test_what_sleep_does_not_support_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_sleep({name: value})
    assert raised.value.found == f"{name}={value}"


def test_other_settings_do_not_matter() -> None:
    check_sleep({})
    check_sleep({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False,max_split_size_mb:64"})
