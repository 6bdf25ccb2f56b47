"""What an agent returns when it ends: nothing, a reward, or a mapping with a reward and numbers to report.

Invariant: what a user's code returns is either understood completely or refused. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from polyreme_environment.contract import ContractError, finite, numbers

_KEYS = {"reward", "metrics"}


@dataclass(frozen=True)
class Result:
    """A reward, None if the agent gave it otherwise, and numbers to report by name."""

    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def read_result(value: object) -> Result:
    """Raises ContractError."""
    if value is None:
        return Result()
    if not isinstance(value, Mapping):
        return Result(finite(value, "reward of the agent"))
    if not value.keys() <= _KEYS:
        raise ContractError(f"expected reward and metrics from the agent; found {sorted(map(str, value.keys() - _KEYS))!r:.100}")
    reward = value.get("reward")
    metrics = numbers(value.get("metrics") or {}, "the agent's metrics")
    return Result(None if reward is None else finite(reward, "reward of the agent"), metrics)
