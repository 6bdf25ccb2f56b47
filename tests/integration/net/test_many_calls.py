"""Calls that share a stream, between both of its sides."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.net import rpc
from polyreme.net.call_stream import MOST_TOLD_BYTES, UNREAD, CallError, CallStream
from polyreme.net.many_calls import ManyCalls, NumberedCall
from support.waiting import until

SECONDS = 300
Call = NumberedCall[pb.RunRequest, pb.RunResponse]
Calls = ManyCalls[pb.RunRequest, pb.RunResponse]


def said(text: str) -> pb.RunRequest:
    return pb.RunRequest(answer=pb.Answer(text=text))


class Echo(environment_pb2_grpc.EnvironmentServiceServicer):
    """Answers each message with its text, those that say so in another way."""

    def __init__(self) -> None:
        self.open, self.done, self.may_read = 0, 0, asyncio.Event()
        self.may_read.set()

    async def RunMany(self, requests: AsyncIterator[pb.RunManyRequest], context: object) -> AsyncIterator[pb.RunManyResponse]:
        async with aclosing(CallStream(self.responses, pb.RunManyResponse, 50).run(requests)) as batches:
            async for batch in batches:
                yield batch

    async def responses(self, requests: AsyncIterator[pb.RunRequest]) -> AsyncGenerator[tuple[pb.RunResponse, bool], None]:
        self.open += 1
        try:
            async for request in requests:
                text = request.answer.text
                if text == "refuse":
                    raise CallError(grpc.StatusCode.ABORTED, "refused")
                if text == "surrogate":
                    raise CallError(grpc.StatusCode.ABORTED, "\ud800")
                if text == "break":
                    raise ValueError("broken")
                if text == "return":
                    break
                length = MOST_TOLD_BYTES if text == "much" else 0
                yield pb.RunResponse(ending=pb.Ending(error=text.ljust(length))), text == "end"
                await self.may_read.wait()
            self.done += 1
        finally:
            self.open -= 1


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Echo, Calls]]:
    echo = Echo()

    def add(server: grpc.aio.Server) -> None:
        environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(echo, server)

    async with rpc.serve("127.0.0.1", 0, add, [], 0.1) as server:
        channel = rpc.connect(f"127.0.0.1:{server.port}")
        calls: Calls = ManyCalls(channel, environment_pb2_grpc.EnvironmentServiceStub(channel).RunMany, pb.RunManyRequest)
        try:
            yield echo, calls
        finally:
            await calls.close()


async def read(call: Call) -> str | None:
    response = await asyncio.wait_for(call.read(), SECONDS)
    return None if response is None else response.ending.error


async def failure(call: Call) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as found:
        while await read(call) is not None:
            pass
    return found.value.code().name, found.value.details()


async def test_calls_share_a_stream_and_keep_their_order() -> None:
    async with connected() as (_, calls):
        all_of_them = [calls.begin(said(f"{number}:0")) for number in range(20)]
        for step in range(1, 5):
            for number, call in enumerate(all_of_them):
                call.write(said(f"{number}:{step}"))
        for number, call in enumerate(all_of_them):
            assert [await read(call) for _ in range(5)] == [f"{number}:{step}" for step in range(5)]
            call.write(said("end"))
            assert [await read(call) for _ in range(3)] == ["end", None, None]
            call.write(said("late"))  # ignored


async def test_a_call_may_end_without_a_last_response() -> None:
    async with connected() as (_, calls):
        assert await read(calls.begin(said("return"))) is None


async def test_a_call_fails_alone() -> None:
    async with connected() as (_, calls):
        other = calls.begin(said("a"))
        assert await failure(calls.begin(said("refuse"))) == ("ABORTED", "refused")
        assert await failure(calls.begin(said("surrogate"))) == ("ABORTED", "?")
        assert await failure(calls.begin(said("break"))) == ("UNKNOWN", "ValueError: broken")
        too_long = calls.begin(said("x" * MOST_TOLD_BYTES))
        assert await failure(too_long) == ("INVALID_ARGUMENT", "expected a message of at most 30 MiB; found 30 MiB")
        too_much = calls.begin(said("much"))
        assert await failure(too_much) == ("INVALID_ARGUMENT", "expected a response of at most 30 MiB; found 30 MiB")
        other.write(said("b"))
        assert [await read(other) for _ in range(2)] == ["a", "b"]


async def test_a_call_has_a_bound_of_messages_that_it_has_not_read() -> None:
    async with connected() as (echo, calls):
        echo.may_read.clear()
        other, full = calls.begin(said("a")), calls.begin(said("b"))
        for _ in range(UNREAD + 2):
            full.write(said("c"))
        assert await failure(full) == ("ABORTED", f"expected to have at most {UNREAD} messages to read")
        echo.may_read.set()
        other.write(said("end"))
        assert [await read(other) for _ in range(3)] == ["a", "end", None]


async def test_calls_may_end_before_they_are_closed() -> None:
    async with connected() as (echo, calls):
        call = calls.begin(said("a"))
        assert await read(call) == "a"
        closing = asyncio.create_task(calls.close(SECONDS))
        await asyncio.sleep(0.05)
        call.write(said("end"))
        assert [await read(call) for _ in range(2)] == ["end", None]
        await asyncio.wait_for(closing, SECONDS / 2)
        await until(lambda: (echo.open, echo.done) == (0, 1))


async def test_calls_that_are_closed_end_on_both_sides() -> None:
    async with connected() as (echo, calls):
        call = calls.begin(said("a"))
        assert await read(call) == "a"
        await calls.close(0.05)
        assert (await failure(call))[0] == "UNAVAILABLE"
        await until(lambda: echo.open == 0)


async def test_what_the_caller_does_not_go_on_with_ends() -> None:
    """A caller that sends nothing more, as another client may."""
    echo = Echo()

    async def batches() -> AsyncIterator[pb.RunManyRequest]:
        request = pb.NumberedRunRequest(number=3, request=said("a"))
        yield pb.RunManyRequest(requests=[request, request])

    told = [told async for batch in echo.RunMany(batches(), None) for told in batch.responses]
    assert [(each.number, each.response.ending.error, each.HasField("status")) for each in told] == [
        (3, "a", False),
        (3, "a", False),
        (3, "", True),
    ]


async def test_a_call_may_take_the_place_of_one_that_is_cancelled() -> None:
    echo = Echo()
    waiting = asyncio.Event()

    async def batches() -> AsyncIterator[pb.RunManyRequest]:
        first, *others = (pb.NumberedRunRequest(number=number, request=said("a")) for number in range(1, 52))
        yield pb.RunManyRequest(requests=[first, *others[:-1]])
        await waiting.wait()
        yield pb.RunManyRequest(requests=others[-1:], cancel=[1])

    told = []
    async for batch in echo.RunMany(batches(), None):
        told += batch.responses
        if len(told) >= 50:
            waiting.set()
    assert sorted(each.number for each in told if each.HasField("status")) == [*range(2, 52)]
    assert not any(each.status.code for each in told)
