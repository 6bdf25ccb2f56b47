"""The definition of a stage: how its rows are read, its objective, and its reference if it has one.

Invariant: a stage is one row of `STAGES`. Loop, engine, checks and commands name no stage. This module imports no torch, because an objective is
created on a learner rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyreme.config.data import Sources
from polyreme_trainer.data.stage_rows import StageRows
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
        reference: returns the Hugging Face directory of the reference from the stage's configuration; None: there is no reference.
    """

    read: Read
    objective: "Callable[[Any], Objective]"
    reference: Callable[[Any], Path | None] = lambda config: None
