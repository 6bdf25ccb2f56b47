"""Clients that are slow, idle or endless, at a real HTTP server with each parser that uvicorn may have."""

import asyncio
import gc
import socket
from contextlib import asynccontextmanager, suppress

import psutil
import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polyreme.net import http_server
from polyreme.net.http_connections import ConnectionLimits, bounded_protocol
from polyreme.net.http_server import serve_http

HEAD = b"GET / HTTP/1.1\r\nhost: localhost\r\n"
POST = b"POST / HTTP/1.1\r\nhost: localhost\r\n"
SHORT = ConnectionLimits(head_seconds=0.2, body_seconds=0.2, write_seconds=0.2)


async def answering(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture(params=[H11Protocol, HttpToolsProtocol], autouse=True)
def parser(request, monkeypatch):
    monkeypatch.setattr(http_server, "bounded_protocol", lambda limits: bounded_protocol(limits, request.param))


@asynccontextmanager
async def serving(limits, app=answering):
    writers = []
    async with serve_http("127.0.0.1", 0, app, limits=limits) as port:

        async def connect():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            return reader, writer

        try:
            yield connect
        finally:
            for writer in writers:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


async def ended(reader):
    """What a connection sends before it ends."""
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionResetError:
        return b""


async def answered(connect):
    reader, writer = await connect()
    writer.write(HEAD + b"connection: close\r\n\r\n")
    return (await ended(reader)).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", HEAD, POST + b"content-length: 5\r\n\r\nab", POST + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n"],
    ids=["nothing", "line", "headers", "body", "chunks"],
)
async def test_a_request_that_does_not_arrive_ends_its_connection(sent):
    async with serving(SHORT) as connect:
        reader, writer = await connect()
        writer.write(sent)
        assert not (await ended(reader)).startswith(b"HTTP/1.1 200")
        assert await answered(connect)


async def test_drops_of_a_request_do_not_move_its_deadline():
    async with serving(SHORT) as connect:
        reader, writer = await connect()
        writer.write(HEAD)

        async def drip():
            while True:
                writer.write(b"x: y\r\n")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert await ended(reader) == b""
        dripping.cancel()


async def test_a_connection_with_answered_requests_stays():
    async with serving(SHORT) as connect:
        reader, writer = await connect()
        for _ in range(2):
            writer.write(POST + b"content-length: 2\r\n\r\nab")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.5)  # longer than the deadlines of a request
        writer.write(HEAD)  # and the deadline of the next one holds
        assert await ended(reader) == b""


@pytest.mark.parametrize("part", [b"a" * 1000, b"x: " + b"a" * 1000 + b"\r\n"], ids=["one", "many"])
async def test_an_endless_head_is_refused(part):
    async with serving(ConnectionLimits(head_bytes=20_000)) as connect:
        reader, writer = await connect()
        writer.write(HEAD + b"y: ")
        sent = 0

        async def flood():
            nonlocal sent
            while True:
                writer.write(part)
                sent += len(part)
                await writer.drain()
                await asyncio.sleep(0)

        flooding = asyncio.create_task(flood())
        assert b" 200 " not in await ended(reader)
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        assert sent < 8 << 20 and await answered(connect)


async def test_an_endless_body_of_tiny_chunks_ends():
    async with serving(ConnectionLimits(body_bytes=20_000)) as connect:
        reader, writer = await connect()
        writer.write(POST + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 10_000)
        assert b" 200 " not in await ended(reader)


async def test_a_client_that_takes_no_answer_loses_its_connection():
    gone = asyncio.Event()

    async def streaming(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        waiting = asyncio.create_task(receive())
        await receive()
        while not waiting.done() or waiting.result()["type"] != "http.disconnect":
            if waiting.done():
                waiting = asyncio.create_task(receive())
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            await asyncio.sleep(0)
        gone.set()

    async with serving(SHORT, streaming) as connect:
        _, writer = await connect()
        writer.write(HEAD + b"\r\n")
        writer.transport.pause_reading()
        await asyncio.wait_for(gone.wait(), 30)


async def test_idle_connections_keep_no_other_client_out():
    async with serving(ConnectionLimits(connections=4)) as connect:
        idle = [await connect() for _ in range(12)]
        for _, writer in idle[::2]:
            writer.write(HEAD)
        assert await answered(connect)
        assert await asyncio.gather(*(ended(reader) for reader, _ in idle[:8])) == [b""] * 8


@pytest.mark.parametrize("turns", range(4))
async def test_a_connection_that_comes_while_the_server_ends_is_ended(recwarn, turns):
    """`turns`: of the event loop between the connection and the end, so asyncio has accepted it in part."""
    loop = asyncio.get_running_loop()
    async with serve_http("127.0.0.1", 0, answering, 1.0) as port:
        client = socket.create_connection(("127.0.0.1", port))
        for _ in range(turns):
            await asyncio.sleep(0)
    with client:
        client.setblocking(False)
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(loop.sock_recv(client, 1), 30) == b""
    gc.collect()
    assert not recwarn.list


async def hanging(scope, receive, send):
    await asyncio.Event().wait()


async def sending_on(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while True:
        await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})


@pytest.mark.parametrize("work", [hanging, sending_on])
async def test_a_server_that_has_ended_has_no_connection(work):
    """A request without an answer, and an answer that its client does not take, both beyond the time to drain."""
    asked = asyncio.Event()

    async def app(scope, receive, send):
        asked.set()
        await work(scope, receive, send)

    async with serve_http("127.0.0.1", 0, app, 1.0) as port:
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(HEAD + b"\r\n")
        await asked.wait()
    with client:
        assert not [each for each in psutil.Process().net_connections() if each.laddr.port == port]
        assert client.recv(12) == (b"HTTP/1.1 500" if work is hanging else b"HTTP/1.1 200")
