"""The server's side of many calls on one stream. Their messages that wait at the same time are sent as one batch, since a message
costs far more than its parts. `many_calls` is the client's side.

Invariant: a call ends with its own status, and with the stream. One that the caller cancels says nothing more.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from polyreme.api.v1.calls_pb2 import CallStatus
from polyreme.net.rpc import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

Batch = Any
"""The messages of many calls. To the server: `requests`, each with `number` and `request`, and the numbers of calls to `cancel`.
To the client: `responses`, each with `number`, `response` and `status`."""
TOLD_BYTES = 1 << 20
"""Size beyond which a batch takes nothing more."""
MOST_TOLD_BYTES = MAX_MESSAGE_BYTES - 2 * TOLD_BYTES
"""Maximum size of a message of one call."""
_ENDING_SECONDS = 0.02
"""Maximum seconds for which calls that begin wait for the end of those that are cancelled."""
UNREAD = 1 << 12
"""Maximum number of messages to a call that it has not read."""
Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class CallError(Exception):
    """The status of a call that failed."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class Requests(Generic[Request]):
    """The messages to one call, until its caller says no more."""

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._changed, self._is_over = asyncio.Event(), False

    def put(self, request: Request) -> bool:
        """Adds a message, unless none may follow. Returns False if too many wait."""
        if self._is_over:
            return True
        if len(self._waiting) == UNREAD:
            return False
        self._waiting.append(request)
        self._changed.set()
        return True

    def end(self) -> None:
        """No message follows."""
        self._is_over = True
        self._changed.set()

    def __aiter__(self) -> AsyncIterator[Request]:
        return self

    async def __anext__(self) -> Request:
        while not self._waiting:
            if self._is_over:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._waiting.popleft()


class CallStream(Generic[Request, Response]):
    """The calls of one stream.

    Args:
        responses: answers a call whose messages it gets: yields its responses, each with whether it is last. Raises CallError.
        batch: makes an empty batch to the client.
        most: the largest number of calls at the same time.
    """

    def __init__(
        self,
        responses: Callable[[AsyncIterator[Request]], AsyncGenerator[tuple[Response, bool], None]],
        batch: Callable[[], Batch],
        most: int,
    ) -> None:
        self._responses, self._batch, self._most = responses, batch, most
        self._calls: dict[int, tuple[asyncio.Task[None], Requests[Request]]] = {}
        self._waiting: deque[tuple[int, Response | None, CallStatus | None]] = deque()
        self._changed = asyncio.Event()
        self._newest, self._is_over = 0, False

    def end(self) -> None:
        """Ends the stream when its last call has ended."""
        self._is_over = True
        self._changed.set()

    async def run(self, batches: AsyncIterator[Batch]) -> AsyncGenerator[Batch, None]:
        """The batches to the client, for those that it sends."""
        reading = asyncio.ensure_future(self._read(batches))
        reading.add_done_callback(lambda _: self.end())
        try:
            while self._calls or self._waiting or not self._is_over:
                await self._changed.wait()
                self._changed.clear()
                if reading.done():
                    reading.result()
                while self._waiting:
                    yield self._taken()
        finally:
            ending = [reading, *(call for call, _ in self._calls.values())]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _read(self, batches: AsyncIterator[Batch]) -> None:
        async for batch in batches:
            cancelled = [self._calls[number][0] for number in batch.cancel if number in self._calls]
            for call in cancelled:
                call.cancel()
            if cancelled:  # a call that begins may need the place of one that ends
                await asyncio.wait(cancelled, timeout=_ENDING_SECONDS)
            for told in batch.requests:
                request = type(told.request)()  # alone: a part of a message keeps all of it
                request.CopyFrom(told.request)
                self._take(told.number, request)
        for _, requests in self._calls.values():
            requests.end()

    def _take(self, number: int, request: Request) -> None:
        if (known := self._calls.get(number)) is not None:
            call, requests = known
            if not requests.put(request):
                self._fail(number, CallError(grpc.StatusCode.ABORTED, f"expected to have at most {UNREAD} messages to read"))
                requests.end()
                call.cancel()
        elif number > self._newest:  # else it has ended
            self._newest = number
            self._begin(number, request)

    def _begin(self, number: int, request: Request) -> None:
        if len(self._calls) >= self._most:
            full = CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"expected at most {self._most} calls on a stream; found more")
            self._fail(number, full)
            return
        requests: Requests[Request] = Requests()
        requests.put(request)
        call = asyncio.ensure_future(self._answer(number, requests))
        self._calls[number] = call, requests
        call.add_done_callback(lambda _: self._remove(number))

    def _remove(self, number: int) -> None:
        del self._calls[number]
        self._changed.set()  # it may have been the last one

    async def _answer(self, number: int, requests: Requests[Request]) -> None:
        is_last = False
        try:
            async with aclosing(self._responses(requests)) as responses:
                async for response, is_last in responses:
                    if (size := response.ByteSize()) > MOST_TOLD_BYTES:
                        found = f"expected a response of at most {MOST_TOLD_BYTES >> 20} MiB; found {size >> 20} MiB"
                        raise CallError(grpc.StatusCode.INVALID_ARGUMENT, found)
                    self._tell(number, response, CallStatus() if is_last else None)
            if not is_last:
                self._tell(number, None, CallStatus())
        except CallError as error:
            self._fail(number, error)
        except Exception as error:
            logger.exception("a call failed")
            self._fail(number, CallError(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}"))

    def _fail(self, number: int, error: CallError) -> None:
        details = str(error).encode(errors="replace").decode()  # user code may have said it
        self._tell(number, None, CallStatus(code=error.code.value[0], details=details))

    def _tell(self, number: int, response: Response | None, status: CallStatus | None) -> None:
        self._waiting.append((number, response, status))
        self._changed.set()

    def _taken(self) -> Batch:
        batch, size = self._batch(), 0
        while self._waiting and size < TOLD_BYTES:
            number, response, status = self._waiting.popleft()
            size += batch.responses.add(number=number, response=response, status=status).ByteSize()
        return batch
