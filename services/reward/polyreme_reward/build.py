"""Loads the configured rewards.

Invariant: only built-in rules with linear time run in this process. Every other reward runs in a worker or on another server.
"""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import entry_points
from pathlib import Path

from polyreme.config.python_source import read_source
from polyreme.config.reward import RewardConfig, RewardSpec
from polyreme.experience.loading import LoadReports, unreported
from polyreme_reward.items import Reward
from polyreme_reward.metrics import RewardMetrics
from polyreme_reward.model.reward import ModelReward
from polyreme_reward.plugins.load import ENTRY_POINTS, Source
from polyreme_reward.rules import BUILTINS, builtin_version, make_rule
from polyreme_reward.rules.reward import RuleReward

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_rewards(
    config: RewardConfig, metrics: RewardMetrics, loads: LoadReports = unreported
) -> AsyncIterator[Sequence[Reward]]:
    """Loads the configured rewards, in order. Ends their processes and connections at the end of the block.

    Args:
        config: the rewards and their limits.
        metrics: the service's metrics.
        loads: reports how much of each reward model is loaded.

    Raises:
        ConfigError: a reward cannot be loaded.
        UnavailableError: loading takes longer than `start_timeout`.
    """
    async with AsyncExitStack() as stack:
        rewards: list[Reward | None] = []
        pooled: list[tuple[int, Source]] = []
        for position, spec in enumerate(config.rewards):
            if spec.url is not None:
                from polyreme_reward.remote.reward import HttpReward  # imports httpx, so only when needed

                remote = HttpReward(
                    spec.label, spec.weight, spec.urls, str(spec.protocol), config.item_timeout, spec.options, spec.security
                )
                stack.push_async_callback(remote.close)
                rewards.append(remote)
            elif spec.model is not None:
                limits = (config.item_timeout, config.start_timeout, config.worker_memory_mib)
                model = ModelReward(spec.label, spec.weight, spec.model, spec.options, *limits, metrics, loads)
                stack.push_async_callback(model.close)
                logger.info("the reward %s: loading %s", model.name, spec.model)
                await model.start()
                logger.info("the reward %s: %s", model.name, model.description)
                rewards.append(model)
            elif is_builtin(spec) and (builtin := BUILTINS.get(str(spec.name))) is not None and builtin.in_process:
                name = str(spec.name)
                rule = make_rule(name, spec.options)
                version = builtin_version(name, spec.options)
                rewards.append(local := RuleReward(name, spec.weight, version, builtin.description, rule, correctness(spec)))
                stack.push_async_callback(local.close)
            else:
                rewards.append(None)
                pooled.append((position, _source(spec)))
        if pooled:
            from polyreme_reward.isolation.pool import PooledReward, WorkerPool

            builtins = [BUILTINS[source["builtin"]] for _, source in pooled if "builtin" in source]
            preload = sorted({module for builtin in builtins for module in ("polyreme_reward.rules", *builtin.preload)})
            sources = [source for _, source in pooled]
            limits = (config.item_timeout, config.start_timeout, config.worker_memory_mib)
            pool = WorkerPool(sources, preload, config.workers, *limits, config.worker_environment, metrics)
            stack.push_async_callback(pool.close)
            await pool.start()
            for index, (position, _) in enumerate(pooled):
                spec = config.rewards[position]
                reward = rewards[position] = PooledReward(spec.label, spec.weight, pool, index, correctness(spec))
                logger.info("the reward %s: %s", reward.name, reward.description)
        yield [reward for reward in rewards if reward is not None]


def is_builtin(spec: RewardSpec) -> bool:
    """Whether a reward that is neither an endpoint nor a model is given by its name alone."""
    return spec.file is None and spec.module is None


def correctness(spec: RewardSpec) -> bool:
    """Whether a reward that runs in Python is a built-in rule whose values are right (1) or wrong (0) with these options."""
    builtin = BUILTINS.get(str(spec.name)) if is_builtin(spec) else None
    return builtin is not None and builtin.correctness and not spec.options.get(builtin.graded_by)


def _source(spec: RewardSpec) -> dict[str, object]:
    """The reward's source in the form of `plugins.load`."""
    if spec.file is not None:
        return {"path": str(spec.file), "code": read_file(spec.file), "function": spec.function, "options": spec.options}
    if spec.module is not None:
        return {"module": spec.module, "function": spec.function, "options": spec.options}
    if spec.name not in BUILTINS and entry_points(group=ENTRY_POINTS, name=str(spec.name)):
        return {"entry_point": spec.name, "options": spec.options}
    if spec.name not in BUILTINS:
        make_rule(str(spec.name), spec.options)  # raises and suggests the nearest name
    return {"builtin": spec.name, "options": spec.options}


def read_file(path: Path) -> str:
    """The text of a Python file. Raises ConfigError."""
    return read_source(path, "Fix `file`. The reward service reads it on its own machine.")
