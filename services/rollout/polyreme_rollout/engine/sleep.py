"""What vLLM's sleep mode does not bear, found before an engine starts.

Invariant: a setting under which sleep would fail, or damage weights, is refused by its name.
"""

from collections.abc import Mapping

from polyreme.errors import ConfigError

ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that configure torch's allocator."""
ASCEND_FORMAT = "VLLM_ASCEND_ENABLE_NZ"
"""Whether vllm-ascend stores weights in FRACTAL_NZ, in which it refuses to wake them one tag at a time; 0: it does not."""


def check_sleep(environment: Mapping[str, str]) -> None:
    """Raises ConfigError when an engine of a colocated run could not sleep and wake under these variables."""
    for name in ALLOCATORS:
        if "expandable_segments:true" in (text := environment.get(name, "")).lower().replace(" ", ""):
            raise ConfigError(
                f"{name} without expandable segments, whose memory a sleeping engine cannot release",
                f"{name}={text}",
                f"Remove expandable_segments from {name} of the replicas, or set placement: separate.",
            )
    if environment.get(ASCEND_FORMAT, "0") != "0":
        raise ConfigError(
            f"{ASCEND_FORMAT}=0, because weights in FRACTAL_NZ cannot be woken before the cache",
            f"{ASCEND_FORMAT}={environment[ASCEND_FORMAT]}",
            f"Unset {ASCEND_FORMAT}, or set placement: separate.",
        )
