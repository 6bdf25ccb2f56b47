"""The samples of one prompt, from whichever replicas it takes.

Invariant: no token that arrived is asked for again. When a replica dies, drains or falls silent, the unfinished samples go on elsewhere
from what they have; what cannot be finished so is an error, never a shorter sample.
"""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import numpy as np

from polyreme.api.v1 import rollout_pb2
from polyreme_trainer.orchestrator.partial_rollouts import BadStreamError, Draft, Drafts, SteppedBackError
from polyreme_trainer.orchestrator.replica_pool import Claim, Fleet

MAX_FAULTS = 5
"""Calls of one attempt that may break before the attempt fails."""

_BUSY = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION)


class GenerateError(Exception):
    """This attempt at the samples failed; another attempt may not."""


@dataclass(frozen=True)
class Generation:
    """What to generate.

    Attributes:
        prompt_ids: int32 [length].
        count: samples.
        max_new: tokens of each at most.
        seed: of a slot, given its index and prefix length.
        min_version: the oldest policy that may write a token.
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

    def blank(self) -> Drafts:
        """No token of any sample."""
        return Drafts(self.count, self.max_new, self.stop_ids, self.min_version)


async def generate(
    fleet: Fleet, wanted: Generation, *, silence: float, patience: float, begun: Drafts | None = None
) -> list[Draft]:
    """All samples, finished, in the order of their indices.

    Args:
        begun: what there is of them already; it grows. None: nothing.
        silence: seconds a running call may bring nothing.
        patience: seconds without a new token, over all calls, after which the attempt fails.

    Raises:
        GenerateError: the attempt failed: too many broken calls, no progress, or a request that no replica takes.
        UnavailableError: there is no usable replica.
    """
    drafts = begun or wanted.blank()
    broken: list[str] = []
    avoid: set[str] = set()
    last_progress, tokens = time.monotonic(), drafts.missing_tokens()
    while asked := drafts.start_call():
        async with fleet.claim(drafts.missing_tokens(), len(asked), wanted.min_version, avoid) as claim:
            try:
                await _call(claim, drafts, _request(wanted, asked), silence)
                continue
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                what, busy = _judge(error, claim, silence)
                claim.failed()
            except SteppedBackError:
                what, busy = f"replica {claim.target.id} went back to an older version", True
                drafts.drop_older()
                last_progress, tokens = time.monotonic(), drafts.missing_tokens()
            except BadStreamError as error:
                claim.failed()
                raise GenerateError(f"replica {claim.target.id}: {error}") from error
        if not busy:
            broken.append(what)
            avoid.add(claim.target.id)
        if drafts.missing_tokens() < tokens:
            last_progress, tokens = time.monotonic(), drafts.missing_tokens()
        if len(broken) > MAX_FAULTS:
            raise GenerateError(f"{len(broken)} calls broke, the last one: {what}")
        if time.monotonic() - last_progress > patience:
            raise GenerateError(f"no new token in {patience:.0f} s, last: {what}")
    return drafts.drafts


async def _call(claim: Claim, drafts: Drafts, request: rollout_pb2.GenerateRequest, silence: float) -> None:
    loop = asyncio.get_running_loop()
    if claim.is_cut:  # between the handing out of the claim and here
        raise TimeoutError
    call = claim.stub.Generate(request)
    try:
        async with asyncio.timeout(silence) as deadline:
            claim.deadline = deadline
            async for response in call:
                claim.arrived(drafts.add(response), drafts.missing_tokens(), response, time.monotonic())
                if claim.is_cut:  # just now: another deadline would take that back
                    raise TimeoutError
                deadline.reschedule(loop.time() + silence)
        if left := drafts.unfinished():
            raise BadStreamError(f"expected every asked slot to end, found {len(left)} of them open at the stream's end")
    finally:
        claim.deadline = None
        call.cancel()


def _request(wanted: Generation, asked: list[Draft]) -> rollout_pb2.GenerateRequest:
    slots = [
        rollout_pb2.Slot(
            index=draft.index,
            prefix_ids=bytes(draft.ids),
            max_new=wanted.max_new - draft.length,
            seed=wanted.seed(draft.index, draft.length),
        )
        for draft in asked
    ]
    return rollout_pb2.GenerateRequest(
        run_id=wanted.run_id,
        request_id=f"{wanted.name}-{uuid.uuid4().hex[:8]}",
        prompt_ids=wanted.prompt_ids.astype("<i4").tobytes(),
        slots=slots,
        sampling=rollout_pb2.SamplingParams(temperature=wanted.temperature, top_p=1.0, top_k=-1, stop_token_ids=wanted.stop_ids),
        min_version=wanted.min_version,
    )


def _judge(error: grpc.aio.AioRpcError | TimeoutError, claim: Claim, silence: float) -> tuple[str, bool]:
    """What happened, and whether the replica only had no room or not the version: that is no fault of the call."""
    if isinstance(error, TimeoutError):
        return f"replica {claim.target.id} left, fell behind, or was silent for {silence:.0f} s", False
    what = f"replica {claim.target.id} answered {error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        raise GenerateError(what) from error
    return what, error.code() in _BUSY
