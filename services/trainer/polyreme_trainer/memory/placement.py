"""The number of devices that a run needs under each placement, and the advice that follows.

Invariant: pure functions of the configuration and the number of devices of the machine on which the check runs.
"""

from collections.abc import Iterator

from polyreme.config.run import RunConfig


def devices_needed(config: RunConfig, placement: str) -> int:
    """Devices of learner and replicas under a placement, on all machines together."""
    ranks = config.trainer.parallel.world_size
    replicas = config.rollout.replicas * config.rollout.tensor_parallel
    return max(ranks, replicas) if placement == "colocated" else ranks + replicas


def advice(config: RunConfig, devices: int) -> Iterator[str]:
    """Yields a notice if this machine has fewer `devices` (0: unknown) than the placement needs, or enough for separate devices.

    A learner on several machines gets none, because the others' devices are unknown here.
    """
    if config.device == "cpu" or not devices or config.trainer.parallel.nodes > 1:
        return
    apart, together = (devices_needed(config, placement) for placement in ("separate", "colocated"))
    needs = "max_staleness: 0" if config.max_staleness and config.rollout.tokens_per_iteration is None else ""
    has = f"this machine has {devices} {config.device} device{'s' if devices > 1 else ''}"
    if config.placement == "separate" and together <= devices < apart:
        yield (
            f"{has}; learner and replicas need {apart} with placement: separate, and {together} with placement: colocated, "
            "where they take turns" + (f" (and needs {needs})" if needs else "")
        )
    elif devices < devices_needed(config, config.placement):
        yield f"{has}; placement: {config.placement} needs {devices_needed(config, config.placement)}"
    elif config.placement == "colocated" and devices >= apart:
        yield f"{has}, enough for placement: separate ({apart}), where generation can overlap training"
