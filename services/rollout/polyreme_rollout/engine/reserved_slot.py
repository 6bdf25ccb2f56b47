"""One decode slot of vLLM's engine is for urgent requests only: those of negative priority, as `VllmEngine.logprobs` asks for a canary.

Invariant: at most `max_num_seqs - 1` ordinary requests run, whatever their number. An urgent request waits for no ordinary one: it has a
slot, and while it lacks blocks of the key-value cache or tokens of the step, each step preempts the latest ordinary request, as vLLM
does for a running request that lacks blocks. Without such a lack no ordinary request notices it.

vLLM plans each step anew, and a step admits waiting requests in the order of priority up to a limit. Only that limit is changed here.
"""

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.request import Request


class ReservedSlot:
    """Mixed into vLLM's Scheduler. Its policy must be "priority"."""

    running: "list[Request]"
    waiting: "RequestQueue"
    max_num_running_reqs: int

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self.polyreme_slots = self.max_num_running_reqs - 1
        self.polyreme_passed_over = False

    def schedule(self, *arguments: object, **options: object) -> "SchedulerOutput":
        runs = any(request.priority < 0 for request in self.running)
        waits = self._polyreme_waits()
        limit = self.polyreme_slots + (runs or waits)
        if waits and self.polyreme_passed_over:
            self._polyreme_preempt()
            limit = len(self.running) + 1  # the preempted request must not return in this step
        # vLLM admits up to the second if it has it (newer releases), else up to the first.
        self.max_num_running_reqs = self.max_num_active_reqs = limit
        output = super().schedule(*arguments, **options)  # type: ignore[misc]
        # A paused engine schedules nothing, and passes nobody over.
        self.polyreme_passed_over = not runs and self._polyreme_waits() and output.total_num_scheduled_tokens > 0
        return output

    def _polyreme_waits(self) -> bool:
        return bool(self.waiting) and self.waiting.peek_request().priority < 0

    def _polyreme_preempt(self) -> None:
        """Preempts the ordinary request that vLLM would choose: of the lowest priority, the latest."""
        ordinary = [request for request in self.running if request.priority >= 0]
        if ordinary:
            victim = max(ordinary, key=lambda request: (request.priority, request.arrival_time))
            self.running.remove(victim)
            self._preempt_request(victim, time.monotonic())  # type: ignore[attr-defined]
