"""The saves of a training loop: when each starts, and the report of each once it is complete. The engine writes them.

Invariant: a save starts only after the previous one has been reported, so at most one is being written and none is forgotten.
This module imports no torch.
"""

import time
from collections.abc import Callable

from polyreme.config.stage import StageTrainer
from polyreme.config.trainer import TrainerConfig
from polyreme_trainer.learner.engine import Saved
from polyreme_trainer.learner.leader import Ranks

Report = Callable[[Saved, float], None]
"""Takes a completed save and the seconds that it stalled training: the wait for the previous save, and the copy of the state."""


class Saving:
    """Starts and reports the saves of one loop. Every method is collective.

    Args:
        finish: `finish_save` of the loop's engine.
        report: called on every rank for each completed save.
        clock: returns seconds.
    """

    def __init__(
        self, finish: Callable[[bool], Saved | None], report: Report, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._finish, self._report, self._clock = finish, report, clock
        self._stall = 0.0
        self._runs, self._newest = False, clock()

    def start(self, begin: Callable[[], None]) -> None:
        """Waits for the previous save, then calls `begin`, which starts the next one."""
        began = time.perf_counter()
        self.finish(wait=True)
        begin()
        self._runs = True
        self._stall = time.perf_counter() - began

    def finish(self, wait: bool) -> None:
        """Reports the running save if it has completed. With `wait`, waits until no save is running. Raises a save's error."""
        if (saved := self._finish(wait)) is not None:
            self._runs, self._newest = False, self._clock()
            self._report(saved, self._stall)

    def is_late(self, seconds: float) -> bool:
        """Whether `seconds` (0: never) passed since the newest save was complete, or since the loop was created before the first.

        A running save is not late, so a save that takes longer than the interval is not followed by another one at once. Clocks
        differ between ranks: rank 0's answer counts.
        """
        return seconds > 0 and not self._runs and self._clock() - self._newest >= seconds

    def is_due(self, number: int, trainer: TrainerConfig | StageTrainer, ranks: Ranks) -> bool:
        """Whether a checkpoint of version or step `number` is due, by number or by time; the same on every rank."""
        if trainer.save_interval > 0 and number % trainer.save_interval == 0:
            return True
        return trainer.save_seconds > 0 and ranks.agree(lambda: self.is_late(trainer.save_seconds))
