"""The scheduler of vLLM's engine: the one that vLLM, or its plugin for the device, has chosen, with this package's extensions.

Invariant: an extension changes which requests run, or when their tokens are delivered; never which tokens are sampled.
"""

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from polyreme_rollout.engine.protocol import CHUNK_TOKENS

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.request_queue import RequestQueue
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request

QUIET_SECONDS = 0.003
"""Without a further request for this long, an idle engine starts."""
LONGEST_WAIT_SECONDS = 0.05

IN_CHUNKS = {"polyreme_in_chunks": True}
"""Extra arguments of a request, by which it asks for chunks."""


def extend_scheduler(scheduler_config: Any) -> None:
    """Mixes the extensions into the scheduler of `scheduler_config`, which is vLLM's."""
    # A partial, since a class that is made here would not reach a spawned process.
    scheduler_config.scheduler_cls = partial(_start, scheduler_config.get_scheduler_cls())


def _start(base: type, **arguments: object) -> object:
    return type(base.__name__, (OutputChunks, ReservedSlot, GatheredStart, base), {})(**arguments)


class GatheredStart:
    """Mixed into vLLM's Scheduler: an idle engine waits until the requests of a batch have arrived, so that they share its steps.

    The samples of an iteration arrive within some hundredths of a second after a swap. vLLM itself would start with the first of
    them; a step takes almost as long for a few requests as for all, so answers of five tokens took twice as many steps as tokens.

    Invariant: a request waits here only while the engine runs no other, and at most LONGEST_WAIT_SECONDS. vLLM's loop sleeps for
    a millisecond after a step in which nothing ran.
    """

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


class ReservedSlot:
    """Mixed into vLLM's Scheduler, whose policy must be "priority": one decode slot is for urgent requests only, those of
    negative priority, as `VllmEngine.logprobs` asks for a canary.

    Invariant: at most `max_num_seqs - 1` ordinary requests run, whatever their number. An urgent request waits for no ordinary
    one: it has a slot, and while it lacks blocks of the key-value cache or tokens of the step, each step preempts the latest
    ordinary request, as vLLM does for a running request that lacks blocks. Without such a lack no ordinary request notices it.

    vLLM plans each step anew, and a step admits waiting requests by priority up to a limit. Only that limit is changed here.
    """

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


class OutputChunks:
    """Mixed into vLLM's Scheduler: delivers the tokens of a sample in chunks. vLLM itself delivers each token alone, and the
    replica's process then spends more time to receive tokens than on all else.

    Invariant: the chunks of a request are its tokens and their log-probabilities, all and in order. Each has the results of
    CHUNK_TOKENS steps; the last one ends with the request. An aborted request leaves nothing behind.
    """

    requests: "dict[str, Request]"

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)
        self.polyreme_held: dict[str, list[EngineCoreOutput]] = {}  # request id -> its outputs, one per step

    def update_from_output(self, *arguments: object, **options: object) -> "dict[int, EngineCoreOutputs]":
        by_client: dict[int, EngineCoreOutputs] = super().update_from_output(*arguments, **options)  # type: ignore[misc]
        for client, sent in list(by_client.items()):
            sent.outputs = [output for each in sent.outputs if (output := self._polyreme_hold(each)) is not None]
            if not (sent.outputs or sent.finished_requests or sent.scheduler_stats):
                del by_client[client]
        return by_client

    def finish_requests(self, *arguments: object, **options: object) -> object:
        aborted = super().finish_requests(*arguments, **options)  # type: ignore[misc]
        for id in self.polyreme_held.keys() - self.requests.keys():
            del self.polyreme_held[id]
        return aborted

    def _polyreme_hold(self, output: "EngineCoreOutput") -> "EngineCoreOutput | None":
        """Returns what to deliver now: the output, or a chunk that ends with it."""
        id, ended = output.request_id, output.finish_reason is not None
        held = self.polyreme_held.get(id)
        if held is None:
            if ended or not _in_chunks(self.requests[id]):
                return output
            held = self.polyreme_held[id] = []
        held.append(output)
        if len(held) < CHUNK_TOKENS and not ended:
            return None
        del self.polyreme_held[id]
        return _joined(held)


def _in_chunks(request: "Request") -> bool:
    params = request.sampling_params
    return params is not None and IN_CHUNKS.items() <= (params.extra_args or {}).items()


def _joined(outputs: "list[EngineCoreOutput]") -> "EngineCoreOutput":
    """The last output, with the tokens of all. What else the others carry is for vLLM's statistics, which are off."""
    last = outputs[-1]
    last.new_token_ids = [id for output in outputs for id in output.new_token_ids]
    rows = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if rows:
        ids, logprobs, ranks = (np.concatenate(column) for column in list(zip(*rows, strict=True))[:3])
        last.new_logprobs = rows[0]._replace(logprob_token_ids=ids, logprobs=logprobs, sampled_token_ranks=ranks)
    return last
