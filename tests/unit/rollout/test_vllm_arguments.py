"""The arguments of vLLM's engine: only options that the device supports."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.config.load import parse_config
from polyreme.errors import ConfigError
from polyreme_rollout.engine.vllm_arguments import CPU_BLOCK_TOKENS, engine_arguments, with_planned_loras
from support.configs import run_config


def arguments(tmp_path: Path, device: str, **vllm: Any) -> dict[str, Any]:
    tree = yaml.safe_load(run_config(tmp_path).to_yaml())
    tree |= {"device": device, "rollout": {**tree["rollout"], "vllm": vllm}}
    return engine_arguments(parse_config(tree, "the test"), tmp_path, random_weights=True, seed=5)


def test_defaults_by_device(tmp_path: Path) -> None:
    on_cpu, on_cuda = arguments(tmp_path, "cpu"), arguments(tmp_path, "cuda")
    assert on_cpu["enable_prefix_caching"] and on_cuda["enable_prefix_caching"]
    assert (on_cpu["enable_chunked_prefill"], on_cuda["enable_chunked_prefill"]) == (False, True)
    assert not {"speculative_config", "gpu_memory_utilization"} & on_cpu.keys()
    assert not {"speculative_config", "kv_cache_memory_bytes", "enforce_eager"} & on_cuda.keys()


def test_requests_without_a_seed_have_that_of_the_replica(tmp_path: Path) -> None:
    assert arguments(tmp_path, "cpu")["seed"] == 5 != run_config(tmp_path).seed


def test_a_short_prompt_has_a_whole_block_on_cpu(tmp_path: Path) -> None:
    on_cpu, on_cuda = arguments(tmp_path, "cpu"), arguments(tmp_path, "cuda")
    assert on_cpu["block_size"] == CPU_BLOCK_TOKENS == 32
    assert "block_size" not in on_cuda


def test_prefix_caching_reaches_the_engine_on_cpu(tmp_path: Path) -> None:
    assert arguments(tmp_path, "cpu", prefix_caching=False)["enable_prefix_caching"] is False


def test_prompts_are_chunked_on_cpu_if_asked(tmp_path: Path) -> None:
    found = arguments(tmp_path, "cpu", chunked_prefill=True, max_num_batched_tokens=512)
    assert (found["enable_chunked_prefill"], found["max_num_batched_tokens"]) == (True, 512)
    assert arguments(tmp_path, "cpu")["max_num_batched_tokens"] == 8192


def test_the_engine_has_a_slot_and_a_token_of_each_step_for_the_canary(tmp_path: Path) -> None:
    tree = yaml.safe_load(run_config(tmp_path).to_yaml())
    for samples, tokens in ((4, 8192), (9000, 9001)):
        changed = tree | {"rollout": {**tree["rollout"], "max_num_seqs": samples}}
        found = engine_arguments(parse_config(changed, "the test"), tmp_path, random_weights=True, seed=5)
        assert (found["max_num_seqs"], found["max_num_batched_tokens"]) == (samples + 1, tokens)


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_options_reach_the_engine(tmp_path: Path, device: str) -> None:
    ngram = {"tokens": 5, "shortest": 1, "longest": 3}
    found = arguments(tmp_path, device, prefix_caching=False, chunked_prefill=False, speculative=ngram)
    assert (found["enable_prefix_caching"], found["enable_chunked_prefill"]) == (False, False)
    assert found["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }


@pytest.mark.parametrize(
    ("vllm", "name"),
    [
        ({"chunked_prefill": True, "max_num_batched_tokens": 8}, "rollout.max_num_seqs"),
        ({"chunked_prefill": True, "max_num_batched_tokens": 256}, "rollout.max_num_seqs = 256"),
        ({"chunked_prefill": False, "max_num_batched_tokens": 15}, "rollout.max_model_len"),
        ({"speculative": {}}, "rollout.vllm.speculative"),
        ({"speculative": {"method": "eagle"}}, "rollout.vllm.speculative.method"),
        ({"speculative": {"shortest": 5, "longest": 4}}, "rollout.vllm.speculative"),
    ],
)
def test_what_the_engine_does_not_have_is_refused_by_name(tmp_path: Path, vllm: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        arguments(tmp_path, "cpu", **vllm)
    assert name in str(refused.value)


def planned(tmp_path: Path, model: dict[str, Any], device: str = "cpu", **vllm: Any) -> int | None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1024, "intermediate_size": 3072, **model}))
    tree = yaml.safe_load(run_config(tmp_path).to_yaml())
    tree |= {"device": device, "model": {"path": str(tmp_path)}, "rollout": {**tree["rollout"], "vllm": vllm}}
    return with_planned_loras(parse_config(tree, "the test")).rollout.vllm.max_loras


def test_a_service_plans_its_adapters_from_the_caches_memory(tmp_path: Path) -> None:
    """An adapter of rank 32 has 84,410,368 bytes here; the sixteenth of 8 GiB is 536,870,912."""
    deep = {"num_hidden_layers": 28}
    assert planned(tmp_path, deep, kv_cache_mib=8192) == 536_870_912 // 84_410_368 == 6
    assert planned(tmp_path, deep, kv_cache_mib=8192, max_lora_rank=64) == 3
    assert planned(tmp_path, deep) == 1
    assert planned(tmp_path, {"num_hidden_layers": 1}, kv_cache_mib=1 << 20) == 32
    assert planned(tmp_path, deep, max_loras=5) == 5
    assert planned(tmp_path, deep, "cuda") == planned(tmp_path, deep | {"num_experts": 8}) == 0


def test_only_engines_with_adapters_keep_room_for_them(tmp_path: Path) -> None:
    assert "enable_lora" not in arguments(tmp_path, "cpu").keys() | arguments(tmp_path, "cpu", max_loras=0).keys()
    found = arguments(tmp_path, "cpu", max_loras=3, max_lora_rank=16)
    assert (found["max_loras"], found["max_lora_rank"]) == (3, 16)
    assert "lm_head" not in found["lora_target_modules"]
