"""The arguments of vLLM's engine for a run.

Invariant: pure. No option changes the distribution of a token or its log-probability. The configuration refuses options that vLLM
does not support on a device.
"""

import json
from pathlib import Path
from typing import Any

from polyreme.config.rollout import NgramConfig
from polyreme.config.run import RunConfig

BATCHED_TOKENS = 8192
"""Default of rollout.vllm.max_num_batched_tokens."""
CPU_BLOCK_TOKENS = 32
"""Tokens per block of the key-value cache on CPU: the least for which vLLM has its fast attention. A group shares whole blocks of
its prompt only, so vLLM's default of 128 would share nothing of a shorter prompt."""

LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers that may have adapters. Otherwise vLLM keeps room for them in the embedding and the output layer, too."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The keys of config.json that hold a number of experts, by family."""
MOST_LORAS = 32
"""Largest planned number of adapters on the device."""


def engine_arguments(config: RunConfig, model_dir: Path, random_weights: bool, seed: int) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs. `seed`: of the requests that have none, which are those of /v1."""
    rollout, options = config.rollout, config.rollout.vllm
    seats = rollout.max_num_seqs + 1  # see `ReservedSlot`
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "load_format": "dummy" if random_weights else "safetensors",
        "dtype": config.model.dtype,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": seats,
        "max_num_batched_tokens": options.max_num_batched_tokens or max(BATCHED_TOKENS, rollout.max_model_len, seats),
        "tensor_parallel_size": rollout.tensor_parallel,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": options.prefix_caching,
        "enable_chunked_prefill": config.chunks_prompts,
        "generation_config": "vllm",
        "seed": seed,
        "scheduling_policy": "priority",  # only `logprobs` is urgent, see `ReservedSlot`
        "disable_log_stats": True,
        "worker_extension_cls": "polyreme_rollout.engine.worker.PolicyWorker",
    }
    if options.speculative is not None:
        arguments["speculative_config"] = _ngram(options.speculative)
    if options.max_loras:
        arguments |= {
            "enable_lora": True,
            "max_loras": options.max_loras,
            "max_cpu_loras": 4 * options.max_loras,
            "max_lora_rank": options.max_lora_rank,
            "lora_target_modules": list(LORA_TARGETS),
        }
    if config.device != "cpu":
        return arguments | {
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "enable_sleep_mode": config.placement == "colocated",
        }
    if rollout.tensor_parallel == 1:
        # The worker runs in the core's process: no shared-memory hop per step, and no process that spins on it.
        arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return arguments | {
        "enforce_eager": True,
        "block_size": CPU_BLOCK_TOKENS,
        "kv_cache_memory_bytes": options.kv_cache_mib << 20,
    }


def with_planned_loras(config: RunConfig) -> RunConfig:
    """The configuration of a training service's sampler with a number as `rollout.vllm.max_loras`, from the model's config.json.

    An adapter of rank r has r numbers for each input and output feature of a linear layer: about r (10 hidden + 3 inner + 4
    key-value features) in each layer of the usual families.
    """
    options = config.rollout.vllm
    if options.max_loras is not None:
        return config
    model = json.loads((config.model.path / "config.json").read_text())
    planned = 0
    if config.device == "cpu" and not any(model.get(key) for key in EXPERTS):
        hidden, inner = model["hidden_size"], model["intermediate_size"]
        width = 4 if config.model.dtype == "float32" else 2
        adapter = options.max_lora_rank * (14 * hidden + 3 * inner) * model["num_hidden_layers"] * width
        planned = max(1, min(MOST_LORAS, (options.kv_cache_mib << 20) // 16 // adapter))
    rollout = config.rollout.model_copy(update={"vllm": options.model_copy(update={"max_loras": planned})})
    return config.model_copy(update={"rollout": rollout})


def _ngram(options: NgramConfig) -> dict[str, object]:
    return {
        "method": options.method,
        "num_speculative_tokens": options.tokens,
        "prompt_lookup_min": options.shortest,
        "prompt_lookup_max": options.longest,
    }
