"""The deadlines and retries of pushes, in one object that every part of a publisher reads."""

from dataclasses import dataclass

from polyreme.process.backoff import Backoff
from polyreme.weights.wire import CHUNK_BYTES, MAX_FETCHES, SLOWEST_STREAM_BYTES_PER_SECOND

BACKOFF = Backoff(first=0.2, longest=5.0)


@dataclass
class PushLimits:
    """The limits are read at each use, so a change holds for what begins afterwards. Times are in seconds.

    Attributes:
        attach: to find the run in Redis; the learner has attached to it already.
        lease_check: between two looks at the replicas' leases.
        stream_interrupt: training waits this long for a slot before it interrupts streams.
        probe, stage, commit: deadlines of the calls. Before a commit the engine's step ends, and the canary takes up to 30 s.
        find_delta: for another machine's answer.
        stream_idle: without progress of a stream.
        memory_bytes_per_second: extends the deadlines of staging, committing and comparing by the size of a version.
        stream_bytes_per_second: extends those of streams.
        chunk_bytes: of the messages of a stream.
        max_fetches: the replicas that fetch a part from one replica at once.
        swap_attempts, reach_attempts: failures in a row before a replica is quarantined. Ten attempts to reach it take about half
            a minute; a dead replica loses its lease earlier.
        backoff: between two attempts.
    """

    attach: float = 5.0
    lease_check: float = 0.25
    stream_interrupt: float = 1.0
    probe: float = 10.0
    stage: float = 30.0
    commit: float = 100.0
    find_delta: float = 30.0
    stream_idle: float = 20.0
    memory_bytes_per_second: float = 100e6
    stream_bytes_per_second: float = SLOWEST_STREAM_BYTES_PER_SECOND
    chunk_bytes: int = CHUNK_BYTES
    max_fetches: int = MAX_FETCHES
    swap_attempts: int = 3
    reach_attempts: int = 10
    backoff: Backoff = BACKOFF

    def memory_seconds(self, nbytes: int) -> float:
        """The longest time that reading so many bytes of a version from memory may take."""
        return nbytes / self.memory_bytes_per_second
