"""GenerateMany: many calls on one stream. What they have to say at the same time is one message, since a message costs far more than its parts.

Invariant: a call ends with its own status, and with the stream. One that the caller cancels says nothing more.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import grpc

from polyreme.api.v1 import rollout_pb2 as pb

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 1 << 20
"""Size beyond which a message takes no further answer."""


class CallError(Exception):
    """The status of a call that failed."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(details)
        self.code = code


Responses = Callable[[pb.GenerateRequest], AsyncGenerator[tuple[pb.GenerateResponse, bool], None]]
"""What answers a call: its responses, each with whether it is the last one. Raises CallError."""


class CallStream:
    """The calls of one stream.

    Args:
        responses: see `Responses`.
        most: the largest number of calls at the same time.
    """

    def __init__(self, responses: Responses, most: int) -> None:
        self._responses, self._most = responses, most
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._waiting: deque[pb.NumberedResponse] = deque()
        self._changed = asyncio.Event()
        self._newest, self._is_over = 0, False

    def end(self) -> None:
        """Ends the stream when its last call has ended."""
        self._is_over = True
        self._changed.set()

    async def run(self, requests: AsyncIterator[pb.GenerateManyRequest]) -> AsyncGenerator[pb.GenerateManyResponse, None]:
        """The messages. Raises CallError for a message that the protocol does not allow."""
        reading = asyncio.ensure_future(self._read(requests))
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
            ending = [reading, *self._calls.values()]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[pb.GenerateManyRequest]) -> None:
        async for message in requests:
            for asked in message.begin:
                self._begin(asked)
            for number in message.cancel:
                if (call := self._calls.get(number)) is not None:
                    call.cancel()

    def _begin(self, asked: pb.NumberedRequest) -> None:
        number = asked.number
        if number <= self._newest:
            raise CallError(grpc.StatusCode.INVALID_ARGUMENT, f"expected a number above {self._newest}; found {number}")
        self._newest = number
        if len(self._calls) >= self._most:
            full = CallError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"expected at most {self._most} calls on a stream; found more")
            self._fail(number, full)
            return
        call = self._calls[number] = asyncio.ensure_future(self._answer(number, asked.request))
        call.add_done_callback(lambda _: self._remove(number))

    def _remove(self, number: int) -> None:
        del self._calls[number]
        self._changed.set()  # it may have been the last one

    async def _answer(self, number: int, request: pb.GenerateRequest) -> None:
        try:
            async with aclosing(self._responses(request)) as responses:
                async for response, is_last in responses:
                    status = pb.CallStatus() if is_last else None
                    self._tell(pb.NumberedResponse(number=number, response=response, status=status))
        except CallError as error:
            self._fail(number, error)
        except Exception as error:
            logger.exception("a call of Generate failed")
            self._fail(number, CallError(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}"))

    def _fail(self, number: int, error: CallError) -> None:
        status = pb.CallStatus(code=error.code.value[0], details=str(error))
        self._tell(pb.NumberedResponse(number=number, status=status))

    def _tell(self, response: pb.NumberedResponse) -> None:
        self._waiting.append(response)
        self._changed.set()

    def _taken(self) -> pb.GenerateManyResponse:
        message, size = pb.GenerateManyResponse(), 0
        while self._waiting and size < MESSAGE_BYTES:
            message.answers.append(self._waiting.popleft())
            size += message.answers[-1].ByteSize()
        return message
