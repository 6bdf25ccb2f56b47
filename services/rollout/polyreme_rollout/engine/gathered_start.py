"""An idle vLLM engine waits until the requests of a batch have arrived, so that they share its steps.

The samples of an iteration arrive within some hundredths of a second after a swap. vLLM itself would start with the first of them; a step
takes almost as long for a few requests as for all, so answers of five tokens took twice as many steps as tokens.

Invariant: a request waits here only while the engine runs no other, and at most LONGEST_WAIT_SECONDS.
"""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.request import Request

QUIET_SECONDS = 0.003
"""Without a further request for this long, the engine starts."""
LONGEST_WAIT_SECONDS = 0.05


class GatheredStart:
    """Mixed into vLLM's Scheduler. vLLM's loop sleeps for a millisecond after a step in which nothing ran."""

    running: "list[Request]"
    waiting: "RequestQueue"
    max_num_running_reqs: int

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self.polyreme_clock = time.monotonic
        self.polyreme_gathered = 0  # requests that waited at the last call; 0: the engine does not gather
        self.polyreme_first = self.polyreme_newest = 0.0

    def schedule(self, *arguments: object, **options: object) -> "SchedulerOutput":
        limit = self.max_num_running_reqs
        if self._polyreme_gathers():
            self.max_num_running_reqs = self.max_num_active_reqs = 0
        output = super().schedule(*arguments, **options)  # type: ignore[misc]
        self.max_num_running_reqs = self.max_num_active_reqs = limit
        if output.total_num_scheduled_tokens or not self.waiting:
            self.polyreme_gathered = 0
        return output

    def _polyreme_gathers(self) -> bool:
        """Whether the engine waits for further requests."""
        if self.running or not self.waiting:
            return False
        now, count = self.polyreme_clock(), len(self.waiting)
        if not self.polyreme_gathered:
            self.polyreme_first = now
        if count != self.polyreme_gathered:
            self.polyreme_gathered, self.polyreme_newest = count, now
        return now < min(self.polyreme_first + LONGEST_WAIT_SECONDS, self.polyreme_newest + QUIET_SECONDS)
