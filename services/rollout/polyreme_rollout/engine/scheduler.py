"""The scheduler of vLLM's engine: the one that vLLM, or its plugin for the device, has chosen, with this package's extensions.

Invariant: an extension changes which requests run, or when their tokens are delivered; never which tokens are sampled.
"""

from functools import partial
from typing import Any

from polyreme_rollout.engine.gathered_start import GatheredStart
from polyreme_rollout.engine.output_chunks import OutputChunks
from polyreme_rollout.engine.reserved_slot import ReservedSlot


def extend_scheduler(scheduler_config: Any) -> None:
    """Mixes the extensions into the scheduler of `scheduler_config`, which is vLLM's."""
    # A partial, since a class that is made here would not reach a spawned process.
    scheduler_config.scheduler_cls = partial(_start, scheduler_config.get_scheduler_cls())


def _start(base: type, **arguments: object) -> object:
    return type(base.__name__, (OutputChunks, ReservedSlot, GatheredStart, base), {})(**arguments)
