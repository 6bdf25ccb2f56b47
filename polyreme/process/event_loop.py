"""The event loop of a service.

Invariant: a service's process runs its main coroutine here, so its loop is chosen in one place.
"""

import asyncio
import gc
import logging
from collections.abc import Coroutine
from typing import TypeVar

import uvloop

T = TypeVar("T")
logger = logging.getLogger(__name__)

_ALLOCATIONS = 10_000
"""Objects that a service makes before the garbage collector looks at them. Python's 700 are those of a few requests, which are
still running then, so its collections find nothing."""


def run_service(main: Coroutine[object, object, T]) -> T:
    """As `asyncio.run`, on uvloop's loop, which needs less CPU than asyncio's for the many small messages of gRPC and Redis."""
    gc.set_threshold(_ALLOCATIONS, *gc.get_threshold()[1:])
    return uvloop.run(main)


async def stay(grpc: str, http: str) -> None:
    """Logs the addresses of a service that is ready, and returns only when it is cancelled."""
    gc.freeze()  # excludes loaded modules from garbage collections
    logger.info("ready: gRPC at %s, HTTP at %s", grpc, http)
    try:
        await asyncio.Event().wait()
    finally:
        logger.info("draining")
