"""Generates the samples of one prompt, over as many replicas as needed.

Invariant: no token that arrived is generated again. When a replica dies, drains or stops sending, the unfinished samples continue
on another one from their prefixes. A sample that cannot be finished is an error, never a shorter sample. With a token budget, a
call may pause a sample before its end; a later call continues it in the same way.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
import numpy as np

from polyreme.api.v1 import rollout_pb2
from polyreme_trainer.orchestrator.generation.partial_rollouts import (
    BadStreamError,
    PartialRollout,
    PartialRollouts,
    SteppedBackError,
)
from polyreme_trainer.orchestrator.generation.token_budget import NextPart
from polyreme_trainer.orchestrator.replicas.claim import Claim
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool

MAX_FAULTS = 5
"""Number of broken calls after which the attempt fails."""

MESSAGES_PER_SECOND = 1000
"""Messages of all calls together beyond which each gathers more tokens: a message costs this process far more than its tokens."""
LEAST_GATHER, MOST_GATHER = 0.2, 2.0
"""Bounds of `gather_seconds`. The death of a replica loses this much more generation; the longest is below SILENCE_TIMEOUT."""

_BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION)


class GenerateError(Exception):
    """This attempt failed. Another attempt may succeed."""


@dataclass(frozen=True)
class Generation:
    """The request for the samples of one prompt.

    Attributes:
        prompt_ids: int32 [length].
        count: number of samples.
        max_new: upper bound of each sample's tokens.
        seed: of a sample, given its index and prefix length.
        min_version: the oldest policy version that may sample a token.
    """

    run_id: str
    name: str
    prompt_ids: np.ndarray
    count: int
    max_new: int
    temperature: float
    stop_ids: tuple[int, ...]
    seed: Callable[[int, int], int]
    min_version: int

    def blank(self) -> PartialRollouts:
        """Partial rollouts without a token."""
        return PartialRollouts(self.count, self.max_new, self.stop_ids, self.min_version)


@dataclass(frozen=True)
class GenerateOptions:
    """How samples are generated.

    Attributes:
        partial: the samples' existing tokens, updated in place. None: none.
        next_part: returns the tokens that the next call may add; it may wait. None: the call may add all missing tokens.
        prefer: id of the replica to use if it has room, since its cache has the prompt.
        arrived: is told of the samples' tokens as they come. None: nobody waits for them, so many of them may come together.
    """

    partial: PartialRollouts | None = None
    next_part: Callable[[PartialRollouts], Awaitable[NextPart]] | None = None
    prefer: str | None = None
    arrived: Callable[[PartialRollouts], None] | None = None


PLAIN = GenerateOptions()
"""Everything at once, on any replica."""


async def generate(
    pool: ReplicaPool, wanted: Generation, options: GenerateOptions = PLAIN, *, chunk_timeout: float, progress_timeout: float
) -> list[PartialRollout]:
    """All samples, finished, in the order of their indices.

    Args:
        chunk_timeout: seconds that a running call may stay silent.
        progress_timeout: seconds without a new token, over all calls, after which the attempt fails.

    Raises:
        GenerateError: the attempt failed: too many broken calls, no progress, or a request that no replica accepts.
        UnavailableError: there is no usable replica.
    """
    rollouts, arrived = options.partial or wanted.blank(), options.arrived
    broken: list[str] = []
    avoid: set[str] = set()
    last_progress, tokens, min_version = time.monotonic(), rollouts.tokens(), wanted.min_version
    while rollouts.end_lost():
        part = None
        if options.next_part is not None:
            began = time.monotonic()
            part = await options.next_part(rollouts)
            last_progress += time.monotonic() - began
            min_version = max(wanted.min_version, part.min_version)
        asked = rollouts.start_call(None if part is None else part.tokens)
        async with pool.claim(rollouts.missing_tokens(), len(asked), min_version, avoid, options.prefer) as claim:
            try:
                gather = LEAST_GATHER if arrived else gather_seconds(pool.calls)
                await _call(claim, rollouts, _request(wanted, asked, min_version, gather), chunk_timeout, arrived)
                last_progress, tokens = time.monotonic(), rollouts.tokens()
                continue
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                what, busy = _explain(error, claim, chunk_timeout)
                claim.failed()
            except SteppedBackError:
                what, busy = f"replica {claim.target.id} went back to an older version", True
                rollouts.drop_older()
                last_progress, tokens = time.monotonic(), rollouts.tokens()
            except BadStreamError as error:
                claim.failed()
                raise GenerateError(f"replica {claim.target.id}: {error}") from error
            finally:
                rollouts.credit(claim.target.id)
        if not busy:
            broken.append(what)
            avoid.add(claim.target.id)
        if rollouts.tokens() > tokens:
            last_progress, tokens = time.monotonic(), rollouts.tokens()
        if len(broken) > MAX_FAULTS:
            raise GenerateError(f"expected at most {MAX_FAULTS} broken calls; found {len(broken)}, the last one: {what}")
        if time.monotonic() - last_progress > progress_timeout:
            raise GenerateError(f"expected a new token within {progress_timeout:.0f} s; last: {what}")
    return rollouts.samples


async def _call(
    claim: Claim,
    rollouts: PartialRollouts,
    request: rollout_pb2.GenerateRequest,
    chunk_timeout: float,
    arrived: Callable[[PartialRollouts], None] | None,
) -> None:
    loop = asyncio.get_running_loop()
    if claim.is_cut:  # since the claim was granted
        raise TimeoutError
    call = claim.calls.begin(request)
    try:
        async with asyncio.timeout(None if claim.asleep else chunk_timeout) as deadline:
            claim.deadline, claim.chunk_timeout = deadline, chunk_timeout
            async for response in call:
                claim.arrived(rollouts.add(response), rollouts.missing_tokens(), response, time.monotonic())
                if arrived:
                    arrived(rollouts)
                if claim.is_cut:  # by that message: a new deadline would undo the cut
                    raise TimeoutError
                deadline.reschedule(None if claim.asleep else loop.time() + chunk_timeout)
        if left := rollouts.running():
            raise BadStreamError(
                f"expected every requested sequence to end; found {len(left)} unfinished at the end of the stream"
            )
    except BaseException:
        call.cancel()
        raise
    finally:
        claim.deadline = None


def gather_seconds(calls: int) -> float:
    """Seconds for which the tokens of a call may wait for others, while so many calls run."""
    return min(MOST_GATHER, max(LEAST_GATHER, calls / MESSAGES_PER_SECOND))


def _request(
    wanted: Generation, asked: list[PartialRollout], min_version: int, gather_seconds: float
) -> rollout_pb2.GenerateRequest:
    sequences = [
        rollout_pb2.Slot(
            index=sample.index,
            prefix_ids=bytes(sample.ids),
            max_new=(wanted.max_new if sample.call_end is None else sample.call_end) - sample.length,
            seed=wanted.seed(sample.index, sample.length),
        )
        for sample in asked
    ]
    return rollout_pb2.GenerateRequest(
        run_id=wanted.run_id,
        request_id=f"{wanted.name}-{secrets.token_hex(4)}",
        prompt_ids=wanted.prompt_ids.astype("<i4").tobytes(),
        slots=sequences,
        sampling=rollout_pb2.SamplingParams(temperature=wanted.temperature, top_p=1.0, top_k=-1, stop_token_ids=wanted.stop_ids),
        min_version=min_version,
        gather_ms=round(1000 * gather_seconds),
    )


def _explain(error: grpc.aio.AioRpcError | TimeoutError, claim: Claim, chunk_timeout: float) -> tuple[str, bool]:
    """The failure's description, and whether the replica was only full or lacked the version, which counts as no broken call."""
    if isinstance(error, TimeoutError):
        return f"replica {claim.target.id} left, fell behind, or was silent for {chunk_timeout:.0f} s", False
    what = f"replica {claim.target.id} answered {error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        raise GenerateError(what) from error
    return what, error.code() in _BUSY
