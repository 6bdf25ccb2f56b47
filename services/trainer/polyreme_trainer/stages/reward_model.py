"""The stage `reward-model`: a score at the last token of a conversation, from pairs of answers (Bradley-Terry).

Invariant: a conversation's tokens equal those that the reward service passes to the exported model.
"""

from typing import TYPE_CHECKING

from polyreme.config.data import Sources
from polyreme.config.stage import RewardModelConfig
from polyreme_trainer.data.preferences import read_scored_pairs
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.template import Template
from polyreme_trainer.stages.stage import Stage

if TYPE_CHECKING:
    from polyreme_trainer.algorithms.objective import Objective


def read(sources: Sources, config: RewardModelConfig, template: Template, limit: int | None) -> StageRows:
    return read_scored_pairs(sources, config, template, limit)


def objective(config: RewardModelConfig) -> "Objective":
    from polyreme_trainer.algorithms.objectives import PairwiseScores

    return PairwiseScores(config.center_coef)


REWARD_MODEL = Stage(read, objective)
