"""The stages: how the rows of each are read, its objective, and its reference if it has one.

Invariant: a stage is one row of `TABLE`, by its name in `polyreme.config.stage.STAGES`. Loop, engine, checks and commands name no
stage. This module imports no torch, because an objective is created on a learner rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyreme.config.data import Sources
from polyreme.config.stage import DpoConfig, Kto, RewardModelConfig, SftConfig
from polyreme_trainer.data.preferences import read_labelled, read_pairs, read_scored_pairs
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.supervised import read_supervised
from polyreme_trainer.data.template import Template

if TYPE_CHECKING:
    from polyreme_trainer.algorithms.objective import Objective

Read = Callable[[Sources, Any, Template, int | None], StageRows]
"""Reads the rows of the data, given the stage's configuration and the maximum number of rows (None: all). Raises DataError."""


@dataclass(frozen=True)
class Stage:
    """One kind of training on rows of a file.

    Attributes:
        read: reads its rows.
        objective: creates the objective from the stage's configuration.
        reference: returns the Hugging Face directory of the reference from the stage's configuration; None: no reference.
    """

    read: Read
    objective: "Callable[[Any], Objective]"
    reference: Callable[[Any], Path | None] = lambda config: None


def _read_supervised(sources: Sources, config: SftConfig, template: Template, limit: int | None) -> StageRows:
    return read_supervised(sources, config.data, template, limit)


def cross_entropy(config: SftConfig | None = None) -> "Objective":
    """The mean over all trained tokens of a step."""
    from polyreme_trainer.algorithms.objectives import CrossEntropy

    return CrossEntropy()


def _scores(config: RewardModelConfig) -> "Objective":
    from polyreme_trainer.algorithms.objectives import PairwiseScores

    return PairwiseScores(config.center_coef)


def _read_preferences(sources: Sources, config: DpoConfig, template: Template, limit: int | None) -> StageRows:
    rows = read_labelled if isinstance(config.loss, Kto) else read_pairs
    return rows(sources, config.data, template, limit)


def _preferences(config: DpoConfig) -> "Objective":
    from polyreme_trainer.algorithms.objectives import LabelledLogprobs, PairwiseLogprobs

    return LabelledLogprobs(config.loss) if isinstance(config.loss, Kto) else PairwiseLogprobs(config.loss)


def _reference(config: DpoConfig) -> Path | None:
    return config.reference or config.model.path if config.loss.needs_reference else None


TABLE = {
    "sft": Stage(_read_supervised, cross_entropy),
    "reward-model": Stage(read_scored_pairs, _scores),
    "dpo": Stage(_read_preferences, _preferences, _reference),
}
