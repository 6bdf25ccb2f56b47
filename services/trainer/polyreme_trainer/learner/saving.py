"""The saves of a training loop: when each starts, and the report of each once it is complete. The engine writes them.

Invariant: a save starts only after the previous one has been reported, so at most one is being written and none is forgotten. This module
imports no torch.
"""

import time
from collections.abc import Callable

from polyreme_trainer.learner.engine import Saved

Report = Callable[[Saved, float], None]
"""Takes a completed save and the seconds for which it stalled training: the wait for the previous save, and the copy of the state."""


class Saving:
    """Starts and reports the saves of one loop. Every method is collective.

    Args:
        finish: `finish_save` of the loop's engine.
        report: called on every rank for each completed save.
    """

    def __init__(self, finish: Callable[[bool], Saved | None], report: Report) -> None:
        self._finish, self._report = finish, report
        self._stall = 0.0

    def start(self, begin: Callable[[], None]) -> None:
        """Waits for the previous save, then calls `begin`, which starts the next one."""
        began = time.perf_counter()
        self.finish(wait=True)
        begin()
        self._stall = time.perf_counter() - began

    def finish(self, wait: bool) -> None:
        """Reports the running save if it has completed. With `wait`, waits until no save is running. Raises the error of a save."""
        if (saved := self._finish(wait)) is not None:
            self._report(saved, self._stall)
