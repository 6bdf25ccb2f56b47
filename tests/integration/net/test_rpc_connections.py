"""Connections to a gRPC server that only occupy it, those of a server that stood still, and calls that wait for it."""

import asyncio
import contextlib
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from polyreme.net import rpc
from support.waiting import until

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_PING = 6
_PINGS = 16


async def test_connections_beyond_the_limit_are_closed() -> None:
    async with rpc.serve("127.0.0.1", 0, lambda _: None, [], connections=8) as server:
        await server.set_ready(True)
        clients = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(24)]
        for _, writer in clients:
            writer.write(_PREFACE)
        ends = [asyncio.ensure_future(_end(reader)) for reader, _ in clients]

        async def is_bounded() -> bool:
            return sum(end.done() for end in ends) == 16

        await until(is_bounded, 60)
        for _, writer in clients:
            writer.close()
        await asyncio.gather(*ends)

        async with rpc.connect(f"127.0.0.1:{server.port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            reply = await check(health_pb2.HealthCheckRequest(), timeout=60, wait_for_ready=True)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_calls_that_come_at_once_wait_for_the_server() -> None:
    """gRPC's own server would cancel those beyond 3,000, and some of those beyond 1,000."""
    async with rpc.serve("127.0.0.1", 0, lambda _: None, []) as server, rpc.connect(f"127.0.0.1:{server.port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        calls = [check(health_pb2.HealthCheckRequest(), timeout=300, wait_for_ready=True) for _ in range(6000)]
        assert len(await asyncio.gather(*calls)) == 6000


def test_grpc_knows_every_option() -> None:
    """It ignores the names of others."""
    [library] = Path(grpc.__file__).parent.rglob("cygrpc*.so")
    known = library.read_bytes()
    assert [name for name, _ in rpc.SERVER_OPTIONS if name.encode() not in known] == []


async def test_pings_in_quick_succession_are_all_answered() -> None:
    async with rpc.serve("127.0.0.1", 0, lambda _: None, []) as server, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(_PREFACE)
        for number in range(_PINGS):
            writer.write(_frame(_PING, number.to_bytes(8, "big")))
            kind = 0
            while kind != _PING:
                head = await reader.readexactly(9)
                kind, payload = head[3], await reader.readexactly(int.from_bytes(head[:3], "big"))
            assert int.from_bytes(payload, "big") == number
        writer.close()


def _frame(kind: int, payload: bytes) -> bytes:
    """A frame of HTTP/2 that concerns the whole connection."""
    return len(payload).to_bytes(3, "big") + bytes((kind, 0, 0, 0, 0, 0)) + payload


async def _end(reader: asyncio.StreamReader) -> None:
    """Returns when the server has closed the connection."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass
