"""Configurations of older versions in today's keys.

Invariant: every key that a version had and today's schema lacks is in `OLD_KEYS`, and an upgraded configuration trains as before.
"""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

Tree = MutableMapping[str, Any]
Convert = Callable[[Any, Tree], dict[str, object]]
"""Today's values by dotted key for the value of an old key, given the whole old configuration."""

_OLD_FLOOR = 1e-4
"""Added to the standard deviation of a group's scores, as version 0.1.0 did before it had presets."""


def _moved(key: str) -> Convert:
    return lambda value, tree: {key: value}


def _kl(value: object, tree: Mapping[str, object]) -> dict[str, object]:
    return {"algorithm.kl": {"place": "loss", "estimator": "k3", "coef": value} if value else None}


def _normalize(value: object, tree: Mapping[str, object]) -> dict[str, object]:
    return {"algorithm.advantage": {"kind": "group_norm", "std_floor": _OLD_FLOOR} if value else {"kind": "group_mean"}}


def _correction(value: object, tree: Tree) -> dict[str, object]:
    """`importance_sampling` and `importance_cap`, which are one value today."""
    old = tree["algorithm"]
    when, cap = old.get("importance_sampling", "auto"), old.get("importance_cap", 2.0)
    if when == "auto" and (cap == 2.0 or not tree.get("max_staleness")):
        return {"algorithm.correction": "auto"}
    return {"algorithm.correction": [] if when == "none" else [{"kind": "token_tis", "cap": cap}]}


def _lam(value: object, tree: Mapping[str, object]) -> dict[str, object]:
    return {"algorithm.advantage.lam": {"alpha": value}} if value else {}


OLD_KEYS: Mapping[str, Convert] = {
    "rollout.threads": _moved("rollout.vllm.threads"),
    "rollout.kv_cache_mib": _moved("rollout.vllm.kv_cache_mib"),
    "rollout.gpu_memory_utilization": _moved("rollout.vllm.gpu_memory_utilization"),
    "algorithm.name": _moved("algorithm.preset"),
    "algorithm.clip_low": _moved("algorithm.loss.low"),
    "algorithm.clip_high": _moved("algorithm.loss.high"),
    "algorithm.kl_coef": _kl,
    "algorithm.normalize_std": _normalize,
    "algorithm.importance_sampling": _correction,
    "algorithm.importance_cap": _correction,
    "algorithm.advantage.length_adaptive_alpha": _lam,
}
"""The keys of older versions that are gone, and what they are today."""

REWRITE = "`polyreme upgrade-config FILE` rewrites it"
"""What an error says of an old key."""

_BEFORE_PRESETS = {
    "algorithm.preset": "grpo",
    "algorithm.kl": None,
    "algorithm.aggregation": "token-mean",
    "algorithm.advantage": {"kind": "group_norm", "std_floor": _OLD_FLOOR},
}
"""What a configuration without presets trained with, where it names nothing else."""


def upgrade(tree: Tree, *, keep_defaults: bool = False) -> list[str]:
    """Replaces the old keys of a configuration, in place. Returns what it changed, one line each; empty: it has no old key.

    Args:
        tree: the mapping of a YAML file, unchecked. A comment at the end of an old key's line moves to its successor.
        keep_defaults: whether the defaults of version 0.1.0 are written also into the file of a run that has no old key.
    """
    before: Tree = _plain(tree)
    found = [key for key in OLD_KEYS if _holder(tree, key) is not None]
    keep_defaults = keep_defaults and "stage" not in tree
    if not found and not keep_defaults:
        return []
    added: dict[str, object] = {}
    changes = []
    for key in found:
        value, comment = _take(tree, key)
        now = OLD_KEYS[key](value, before)
        for new, converted in now.items():
            _put(tree, new, converted, comment)
            added[new] = converted
        changes.append(f"{key}: {value} -> {', '.join(f'{new}: {each}' for new, each in now.items()) or 'its default'}")
    has_preset = "preset" in before.get("algorithm", {})
    is_before_presets = not has_preset and (keep_defaults or found != ["algorithm.advantage.length_adaptive_alpha"])
    for key, value in _BEFORE_PRESETS.items() if is_before_presets else ():
        if _holder(tree, key) is None:
            _put(tree, key, value, None)
            changes.append(f"{key}: {value}, which was the default")
    return changes


def _plain(tree: Mapping[str, object]) -> dict[str, object]:
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in tree.items()}


def _holder(tree: Tree, key: str) -> Tree | None:
    """The mapping that has a dotted key, or None."""
    *parents, last = key.split(".")
    for parent in parents:
        inner = tree.get(parent) if isinstance(tree, MutableMapping) else None
        if not isinstance(inner, MutableMapping):
            return None
        tree = inner
    return tree if last in tree else None


def _take(tree: Tree, key: str) -> tuple[object, object]:
    """Removes a key. Returns its value and the comments of its line, as `ruamel.yaml` keeps them, if there are any."""
    holder, last = _holder(tree, key), key.rpartition(".")[2]
    assert holder is not None
    comments = getattr(holder, "ca", None)
    return holder.pop(last), None if comments is None else comments.items.pop(last, None)


def _put(tree: Tree, key: str, value: object, comment: object) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(tree.get(parent), MutableMapping):
            tree[parent] = type(tree)()
        tree = tree[parent]
    tree[last] = value
    if comment is not None:
        tree.ca.items[last] = comment  # type: ignore[attr-defined]
