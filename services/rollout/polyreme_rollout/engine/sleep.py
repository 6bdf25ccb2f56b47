"""Checks, before an engine starts, for settings that vLLM's sleep mode does not support.

Invariant: a setting under which sleep would fail, or damage weights, is refused by its name.
"""

from collections.abc import Mapping

from polyreme.errors import ConfigError

ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that configure torch's allocator."""


def check_sleep(environment: Mapping[str, str]) -> None:
    """Raises ConfigError when an engine of a colocated run could not sleep and wake under these variables."""
    for name in ALLOCATORS:
        if "expandable_segments:true" in (text := environment.get(name, "")).lower().replace(" ", ""):
            raise ConfigError(
                f"{name} without expandable segments, whose memory a sleeping engine cannot release",
                f"{name}={text}",
                f"Remove expandable_segments from {name} of the replicas, or set placement: separate.",
            )
