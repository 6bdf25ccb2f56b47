"""The event loop of a service.

Invariant: a service's process runs its main coroutine here, so its loop is chosen in one place.
"""

from collections.abc import Coroutine
from typing import TypeVar

import uvloop

T = TypeVar("T")


def run_service(main: Coroutine[object, object, T]) -> T:
    """As `asyncio.run`, on uvloop's loop, which needs less CPU than asyncio's for the many small messages of gRPC and Redis."""
    return uvloop.run(main)
