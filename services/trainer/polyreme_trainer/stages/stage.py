"""The definition of a stage: how its rows are read, what it minimises, and whether a reference takes part.

Invariant: a stage is one row of `STAGES`. Loop, engine, checks and commands know none by name. No torch here: an objective is created on a
learner rank.
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
"""The rows of the data, given the stage's configuration and how many rows to read at most (None: all). Raises DataError."""


@dataclass(frozen=True)
class Stage:
    """One kind of training on rows of a file.

    Attributes:
        read: its rows.
        objective: made of the stage's configuration.
        reference: Hugging Face directory of the reference, of the stage's configuration; None: there is none.
    """

    read: Read
    objective: "Callable[[Any], Objective]"
    reference: Callable[[Any], Path | None] = lambda config: None
