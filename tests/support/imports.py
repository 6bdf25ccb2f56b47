"""What an imported configuration trains: the resolved mathematics, as plain values to compare with those of the original."""

import tempfile
from pathlib import Path
from typing import Any

import yaml

from polyreme.config.load import parse_config
from polyreme.config.run import RunConfig
from polyreme.config.trainer import OptimizerConfig
from polyreme.import_config.application import Imported
from polyreme.import_config.render import text_of
from polyreme.import_config.systems import import_file
from polyreme_trainer.learner.learning_rate import learning_rate


def import_text(
    text: str, system: str | None = None, *, rows: int | None = None, suffix: str = ".yaml"
) -> tuple[Imported, RunConfig]:
    """The import of a configuration's text, and the run that results from reading what is written."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"original{suffix}"
        file.write_text(text)
        source, found = import_file(file, system, rows)
    return found, parse_config(yaml.safe_load(text_of(found, source.title, "original")), "original")


def lost_keys(found: Imported) -> list[str]:
    """The keys that an import reports as not carried over, in the report's order."""
    return [entry.key for entry in found.lost]


def mathematics(run: RunConfig) -> dict[str, Any]:
    """Advantage, loss, KL, aggregation, shaping, schedules at five iterations, batch arithmetic and ranks of a run."""
    critic = run.trainer.critic.optimizer or run.trainer.optimizer
    return {
        "advantage": run.algorithm.advantage.model_dump(),
        "loss": run.algorithm.loss.model_dump(),
        "aggregation": run.algorithm.aggregation,
        "kl": None if run.algorithm.kl is None else run.algorithm.kl.model_dump(exclude_defaults=True),
        "rates": rates(run.trainer.optimizer, run.iterations),
        "critic rates": rates(critic, run.iterations) if run.algorithm.has_critic else None,
        "batch": (run.groups_per_iteration, run.group_size, run.algorithm.minibatches, run.algorithm.epochs),
        "ranks": (run.trainer.parallel.layout, run.rollout.replicas, run.rollout.tensor_parallel),
    }


def rates(optimizer: OptimizerConfig, iterations: int) -> list[float]:
    """The learning rates of five iterations: the first two, the middle, and the last two."""
    return [learning_rate(optimizer, i, iterations) for i in (1, 2, iterations // 2, iterations - 1, iterations)]
