"""The calls of Generate to one replica, on one stream: a call of its own costs both sides far more than a message.

Invariant: a call ends with its own status, or with that of the stream, which ends all calls that are on it and no others. The next call then
begins another stream.
"""

import asyncio
from collections.abc import AsyncIterator

import grpc

from polyreme.api.v1 import rollout_pb2 as pb
from polyreme.api.v1.rollout_pb2_grpc import RolloutServiceStub

MESSAGE_BYTES = 1 << 20
"""Size beyond which a message takes no further request."""
_ENDED = pb.CallStatus(code=grpc.StatusCode.UNAVAILABLE.value[0], details="the replica has ended the stream of its calls")
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class NumberedCall:
    """A call. Iterates over its responses, and raises AioRpcError if it fails."""

    def __init__(self, number: int, stream: "_Stream") -> None:
        self._number, self._stream = number, stream
        self._answers: asyncio.Queue[pb.NumberedResponse] = asyncio.Queue()  # bounded by the tokens that were asked for

    def put(self, answer: pb.NumberedResponse) -> None:
        """Takes what the replica has answered."""
        self._answers.put_nowait(answer)

    def cancel(self) -> None:
        """Ends the call, unless it has ended."""
        self._stream.cancel(self._number)

    async def __aiter__(self) -> AsyncIterator[pb.GenerateResponse]:
        while True:
            answer = await self._answers.get()
            if answer.HasField("response"):
                yield answer.response
            if answer.HasField("status"):
                if answer.status.code:
                    raise _error(answer.status)
                return


class ReplicaCalls:
    """The calls to the replica at the other end of a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel, self._stub = channel, RolloutServiceStub(channel)
        self._stream: _Stream | None = None

    def generate(self, request: pb.GenerateRequest) -> NumberedCall:
        """Begins a call. Its caller cancels it unless it has ended by itself."""
        if self._stream is None or self._stream.is_over:
            self._stream = _Stream(self._stub)
        return self._stream.begin(request)

    async def close(self) -> None:
        """Ends all calls, and closes the channel."""
        if self._stream is not None:
            await self._stream.close()
        await self._channel.close(grace=1.0)


class _Stream:
    """One stream, and the calls that are on it."""

    def __init__(self, stub: RolloutServiceStub) -> None:
        self._calls: dict[int, NumberedCall] = {}
        self._unsent: dict[int, pb.GenerateRequest] = {}
        self._cancelled: list[int] = []
        self._changed = asyncio.Event()
        self._newest, self.is_over = 0, False
        self._reading = asyncio.ensure_future(self._read(stub.GenerateMany(self._messages())))

    def begin(self, request: pb.GenerateRequest) -> NumberedCall:
        self._newest += 1
        call = self._calls[self._newest] = NumberedCall(self._newest, self)
        self._unsent[self._newest] = request
        self._changed.set()
        return call

    def cancel(self, number: int) -> None:
        if self._calls.pop(number, None) is not None and self._unsent.pop(number, None) is None:
            self._cancelled.append(number)
            self._changed.set()

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._end(_ENDED)  # it may not have begun to read

    async def _read(self, stream: "grpc.aio.StreamStreamCall[pb.GenerateManyRequest, pb.GenerateManyResponse]") -> None:
        status = _ENDED
        try:
            async for message in stream:
                for answer in message.answers:
                    self._take(answer)
        except grpc.aio.AioRpcError as error:
            code = error.code()
            if code is grpc.StatusCode.INTERNAL:  # a message has met the end of the stream
                code = grpc.StatusCode.UNAVAILABLE
            status = pb.CallStatus(code=code.value[0], details=error.details() or "")
        finally:
            stream.cancel()
            self._end(status)

    def _end(self, status: pb.CallStatus) -> None:
        self.is_over = True
        self._changed.set()
        for call in self._calls.values():
            call.put(pb.NumberedResponse(status=status))
        self._calls.clear()

    def _take(self, answer: pb.NumberedResponse) -> None:
        call = self._calls.pop(answer.number, None) if answer.HasField("status") else self._calls.get(answer.number)
        if call is not None:  # it was not cancelled
            call.put(answer)

    async def _messages(self) -> AsyncIterator[pb.GenerateManyRequest]:
        while not self.is_over:
            await self._changed.wait()
            self._changed.clear()
            while self._unsent or self._cancelled:
                yield self._taken()

    def _taken(self) -> pb.GenerateManyRequest:
        message, size = pb.GenerateManyRequest(cancel=self._cancelled), 0
        self._cancelled.clear()
        while self._unsent and size < MESSAGE_BYTES:
            number = next(iter(self._unsent))
            message.begin.add(number=number, request=self._unsent.pop(number))
            size += message.begin[-1].ByteSize()
        return message


def _error(status: pb.CallStatus) -> grpc.aio.AioRpcError:
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=status.details)
