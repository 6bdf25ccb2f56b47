"""Many calls to a server on one stream: a call costs both sides far more than a message. `call_stream` is the server's side.

Invariant: a call ends with its own status, or with that of the stream, which ends all calls that are on it and no others. The
next call then begins another stream.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Generic

import grpc

from polyreme.api.v1.calls_pb2 import CallStatus
from polyreme.net.call_stream import MOST_TOLD_BYTES, TOLD_BYTES, Batch, Request, Response

_ENDED = CallStatus(code=grpc.StatusCode.UNAVAILABLE.value[0], details="the server has ended the stream of its calls")
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class NumberedCall(Generic[Request, Response]):
    """A call. Its caller cancels it unless it has ended by itself."""

    def __init__(self, number: int, stream: "_Stream[Request, Response]") -> None:
        self._number, self._stream = number, stream
        self._told: asyncio.Queue[tuple[Response | None, CallStatus | None]] = asyncio.Queue()  # bounded by what was asked for
        self._status: CallStatus | None = None

    def put(self, response: Response | None, status: CallStatus | None) -> None:
        """Takes what the server has told."""
        self._told.put_nowait((response, status))

    def write(self, request: Request) -> None:
        """Sends a further message. A call that has ended says so, and why, at the next read."""
        self._stream.write(self._number, request)

    async def read(self) -> Response | None:
        """The next response; None: the call has ended well. Raises AioRpcError if it has failed."""
        while self._status is None:
            response, self._status = await self._told.get()
            if response is not None:
                return response
        if self._status.code:
            raise _error(self._status)
        return None

    def cancel(self) -> None:
        """Ends the call, unless it has ended."""
        self._stream.cancel(self._number)

    async def __aiter__(self) -> AsyncIterator[Response]:
        while (response := await self.read()) is not None:
            yield response


class ManyCalls(Generic[Request, Response]):
    """The calls of a method to the server at the other end of a channel.

    Args:
        channel: closed by this object.
        method: the stub's, which begins a stream.
        batch: makes an empty batch to the server.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        method: Callable[[AsyncIterator[Batch]], grpc.aio.StreamStreamCall],
        batch: Callable[[], Batch],
    ) -> None:
        self._channel, self._method, self._batch = channel, method, batch
        self._stream: _Stream[Request, Response] | None = None

    def begin(self, request: Request) -> NumberedCall[Request, Response]:
        """Begins a call with its first message."""
        if self._stream is None or self._stream.is_over:
            self._stream = _Stream(self._method, self._batch)
        return self._stream.begin(request)

    async def close(self, grace: float = 0.0) -> None:
        """Ends all calls, after at most `grace` seconds in which they may end, and closes the channel."""
        try:
            if self._stream is not None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace):
                        await self._stream.until_idle()
        finally:
            if self._stream is not None:
                await self._stream.close()
            await self._channel.close(grace=1.0)


class _Stream(Generic[Request, Response]):
    """One stream, and the calls that are on it."""

    def __init__(self, method: Callable[[AsyncIterator[Batch]], grpc.aio.StreamStreamCall], batch: Callable[[], Batch]) -> None:
        self._batch = batch
        self._calls: dict[int, NumberedCall[Request, Response]] = {}
        self._unsent: deque[tuple[int, Request]] = deque()
        self._cancelled: list[int] = []
        self._changed, self._idle = asyncio.Event(), asyncio.Event()
        self._newest, self.is_over = 0, False
        self._reading = asyncio.ensure_future(self._read(method(self._batches())))

    def begin(self, request: Request) -> NumberedCall[Request, Response]:
        self._newest += 1
        call = self._calls[self._newest] = NumberedCall(self._newest, self)
        self._idle.clear()
        self.write(self._newest, request)
        return call

    def write(self, number: int, request: Request) -> None:
        if number not in self._calls:
            return
        if (size := request.ByteSize()) > MOST_TOLD_BYTES:
            found = f"expected a message of at most {MOST_TOLD_BYTES >> 20} MiB; found {size >> 20} MiB"
            self._calls[number].put(None, CallStatus(code=grpc.StatusCode.INVALID_ARGUMENT.value[0], details=found))
            self.cancel(number)
            return
        self._unsent.append((number, request))
        self._changed.set()

    def cancel(self, number: int) -> None:
        if number in self._calls:
            self._pop(number)
            self._cancelled.append(number)
            self._changed.set()

    async def until_idle(self) -> None:
        if self._calls:
            await self._idle.wait()

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._end(_ENDED)  # it may not have begun to read

    async def _read(self, stream: grpc.aio.StreamStreamCall) -> None:
        status = _ENDED
        try:
            async for batch in stream:
                for told in batch.responses:
                    self._take(told)
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code is grpc.StatusCode.INTERNAL:  # a message has met the end of the stream
                code = grpc.StatusCode.UNAVAILABLE
            status = CallStatus(code=code.value[0], details=error.details() or "")
        finally:
            stream.cancel()
            self._end(status)

    def _end(self, status: CallStatus) -> None:
        self.is_over = True
        self._changed.set()
        self._idle.set()
        for call in self._calls.values():
            call.put(None, status)
        self._calls.clear()

    def _take(self, told: Batch) -> None:
        if (call := self._calls.get(told.number)) is None:  # it was cancelled
            return
        status = told.status if told.HasField("status") else None
        if status is not None:
            self._pop(told.number)
        call.put(told.response if told.HasField("response") else None, status)

    def _pop(self, number: int) -> None:
        del self._calls[number]
        if not self._calls:
            self._idle.set()

    async def _batches(self) -> AsyncIterator[Batch]:
        while not self.is_over:
            await self._changed.wait()
            self._changed.clear()
            while self._unsent or self._cancelled:
                yield self._taken()

    def _taken(self) -> Batch:
        batch, size = self._batch(), 0
        batch.cancel.extend(self._cancelled)
        self._cancelled.clear()
        while self._unsent and size < TOLD_BYTES:
            number, request = self._unsent.popleft()
            if number in self._calls:
                size += batch.requests.add(number=number, request=request).ByteSize()
        return batch


def _error(status: CallStatus) -> grpc.aio.AioRpcError:
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=status.details)
