"""Fixtures for several integration tests."""

import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from redis.asyncio import Redis

from polyreme.isolation.sandbox.modes import why_not
from polyreme.isolation.sandbox.program import Mode
from polyreme.process.lifecycle import OWNER_DIED
from support.publishing import World, publishing


@pytest.fixture(autouse=True)
def signal_handlers_of_before() -> Iterator[None]:
    """Restores signal handlers that code in the test's process has changed. Processes of later tests would inherit an ignored signal."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, OWNER_DIED)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
async def world(redis: Redis, redis_url: str, run_id: str) -> AsyncIterator[World]:
    async with publishing(redis, redis_url, run_id) as world:
        yield world


@pytest.fixture(params=[Mode.BUBBLEWRAP, Mode.LANDLOCK, Mode.NONE])
def mode(request: pytest.FixtureRequest) -> Mode:
    """Each isolation of a sandbox that works here, and none."""
    if request.param is not Mode.NONE and (reason := why_not(request.param)) is not None:
        pytest.skip(f"{request.param} does not work here: {reason}")
    return Mode(request.param)
