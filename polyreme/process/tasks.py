"""Structured concurrency that fails with one plain exception.

Invariant: when a block ends, all of its tasks have ended.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup that raises its first failure, after all other tasks have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


async def together(coroutines: Iterable[Coroutine[object, object, T]]) -> list[T]:
    """The results in order. The first failure cancels the others and is raised."""
    async with task_group() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]


async def end_all(tasks: Iterable["asyncio.Task[T]"]) -> None:
    """Cancels the tasks and waits for their ends, whatever these are."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def unless(ends: Coroutine[object, object, object], work: Coroutine[object, object, T]) -> T | None:
    """The result of `work`; None if `ends` returns first, which cancels `work`."""
    working, ending = asyncio.create_task(work), asyncio.create_task(ends)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        ending.result()
        return None
    finally:
        await end_all((working, ending))


@asynccontextmanager
async def running(*works: Coroutine[object, object, T]) -> AsyncIterator[list["asyncio.Task[T]"]]:
    """The tasks of `works`. They have ended at the end of the block, whatever their ends are."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield tasks
    finally:
        await end_all(tasks)
