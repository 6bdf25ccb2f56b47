"""The stage `sft`: cross entropy of answers in conversations of one or several turns.

Invariant: every trained token of a step has the same weight.
"""

from typing import TYPE_CHECKING

from polyreme.config.data import Sources
from polyreme.config.stage import SftConfig
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.supervised import read_supervised
from polyreme_trainer.data.template import Template
from polyreme_trainer.stages.stage import Stage

if TYPE_CHECKING:
    from polyreme_trainer.algorithms.objective import Objective


def read(sources: Sources, config: SftConfig, template: Template, limit: int | None) -> StageRows:
    return read_supervised(sources, config.data, template, limit)


def objective(config: SftConfig) -> "Objective":
    return cross_entropy()


def cross_entropy() -> "Objective":
    """The mean over all trained tokens of the step."""
    from polyreme_trainer.algorithms.objectives import CrossEntropy

    return CrossEntropy()


SUPERVISED = Stage(read, objective)
