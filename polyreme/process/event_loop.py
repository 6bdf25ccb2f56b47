"""The event loop of a service.

Invariant: a service's process runs its main coroutine here, so its loop is chosen in one place.
"""

import gc
from collections.abc import Coroutine
from typing import TypeVar

import uvloop

T = TypeVar("T")

_ALLOCATIONS = 10_000
"""Objects that a service makes before the garbage collector looks at them. Python's 700 are those of two requests, which are still running
then: collections that find nothing take a fifth of a service's time."""


def run_service(main: Coroutine[object, object, T]) -> T:
    """As `asyncio.run`, on uvloop's loop, which needs less CPU than asyncio's for the many small messages of gRPC and Redis."""
    gc.set_threshold(_ALLOCATIONS, *gc.get_threshold()[1:])
    return uvloop.run(main)
