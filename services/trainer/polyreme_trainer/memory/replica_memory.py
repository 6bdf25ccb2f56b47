"""The memory of a replica's device: the policy's weights and the cache of keys and values.

Invariant: as in `memory_estimate`, it reads config.json files and nothing else, imports no torch, and allocates nothing.
"""

from collections.abc import Iterator

from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, PolyremeError
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.memory.estimate import GIB, cache_bytes_per_token, replica_weights
from polyreme_trainer.memory.state import WIDTHS, Addend


def replica_line(config: RunConfig) -> str:
    """A replica's weights and its cache, per device."""
    arch, rollout, dtype = load_architecture(config.model.path), config.rollout, config.model.dtype
    weights = replica_weights(arch, dtype, rollout.tensor_parallel)
    each = cache_bytes_per_token(arch, dtype, rollout.tensor_parallel)
    wanted = rollout.max_num_seqs * rollout.max_model_len
    if config.device == "cpu":
        cache = (
            f"{rollout.vllm.kv_cache_mib / 1024:,.3f} GiB of key-value cache, "
            f"{(rollout.vllm.kv_cache_mib << 20) // each:,} tokens"
        )
    else:
        cache = f"key-value cache up to {rollout.vllm.gpu_memory_utilization:.0%} of the device"
    return (
        f"{weights / GIB:,.3f} GiB of weights, {cache} at {each:,} bytes each"
        f" ({rollout.max_num_seqs} samples of {rollout.max_model_len} tokens need {wanted * each / GIB:,.3f} GiB)"
    )


def sleeping_weights(config: RunConfig) -> Addend | None:
    """The host memory of a machine's colocated replicas while they sleep; None where they keep or drop their weights.

    Replicas of a learner on several machines count as evenly spread over these.
    """
    rollout = config.rollout
    if (config.placement, rollout.engine, rollout.vllm.sleep_level) != ("colocated", "vllm", 1) or config.device == "cpu":
        return None
    count = -(-rollout.replicas // config.trainer.parallel.nodes)
    each = load_architecture(config.model.path).parameters * WIDTHS[config.model.dtype]
    return Addend(
        "weights of sleeping replicas", count * each, f"{count} replica(s) x {each:,} bytes (rollout.vllm.sleep_level: 1)"
    )


def refuse_replica(config: RunConfig, device: int) -> Iterator[PolyremeError]:
    """Yields an error if vLLM cannot start on an accelerator of `device` bytes: no room for the weights and a full-length sample.

    Layers with a sliding window do not count, because vLLM keeps fewer of their keys.
    """
    rollout, dtype = config.rollout, config.model.dtype
    if config.device == "cpu" or rollout.engine != "vllm":
        return
    arch = load_architecture(config.model.path)
    weights = replica_weights(arch, dtype, rollout.tensor_parallel)
    full = arch.layers - sum(arch.sliding)
    sample = rollout.max_model_len * cache_bytes_per_token(arch, dtype, rollout.tensor_parallel) * full // arch.layers
    room = int(device * rollout.vllm.gpu_memory_utilization)
    if room < weights + sample:
        yield ConfigError(
            f"a replica that fits {rollout.vllm.gpu_memory_utilization:.0%} of the {device / GIB:,.1f} GiB of each device: "
            f"{room / GIB:,.2f} GiB",
            f"weights {weights / GIB:,.2f} + keys and values of one sample of {rollout.max_model_len:,} tokens "
            f"{sample / GIB:,.2f} = {(weights + sample) / GIB:,.2f} GiB, with rollout.tensor_parallel: {rollout.tensor_parallel}",
            "Set a larger rollout.tensor_parallel, a smaller rollout.max_model_len or model.dtype: bfloat16, "
            "or use larger devices.",
        )
