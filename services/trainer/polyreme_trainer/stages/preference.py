"""The stage `dpo`: a policy from pairs of answers (DPO, IPO, SimPO, ORPO), or from good and bad ones (KTO), without a reward model.

Invariant: a reference is used only if the loss needs one, and never changes.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from polyreme.config.data import Sources
from polyreme.config.stage import DpoConfig, Kto
from polyreme_trainer.data.preferences import read_labelled, read_pairs
from polyreme_trainer.data.stage_rows import StageRows
from polyreme_trainer.data.template import Template
from polyreme_trainer.stages.stage import Stage

if TYPE_CHECKING:
    from polyreme_trainer.algorithms.objective import Objective


def read(sources: Sources, config: DpoConfig, template: Template, limit: int | None) -> StageRows:
    rows = read_labelled if isinstance(config.loss, Kto) else read_pairs
    return rows(sources, config.data, template, limit)


def objective(config: DpoConfig) -> "Objective":
    from polyreme_trainer.algorithms.objectives import LabelledLogprobs, PairwiseLogprobs

    return LabelledLogprobs(config.loss) if isinstance(config.loss, Kto) else PairwiseLogprobs(config.loss)


def reference(config: DpoConfig) -> Path | None:
    return config.reference or config.model.path if config.loss.needs_reference else None


PREFERENCE = Stage(read, objective, reference)
