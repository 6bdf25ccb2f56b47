"""The part server over real gRPC: it sends bytes of one complete version, and only to callers with the token."""

from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import pytest

from polyreme.api.v1 import weights_pb2 as pb
from polyreme.config.security import SecurityConfig
from polyreme.errors import ConfigError, UnavailableError
from polyreme.net import rpc
from polyreme.weights.arena import Arena
from polyreme.weights.wire import decode_chunk
from polyreme_trainer.weight_sync.part_server import PartServer, check_part_server

PART, TERM, OLD, NEW = 1, 4, 7, 8
"""The part served; the versions in slots 0 and 1."""
NBYTES = 16 << 20  # more than gRPC buffers
TOKEN = SecurityConfig(token_env="PART_TOKEN")


@pytest.fixture
def arena(run_id: str) -> Iterator[Arena]:
    """An arena with two complete versions of one part."""
    arena = Arena.create(run_id, NBYTES, part=PART)
    for slot, version in enumerate((OLD, NEW)):
        arena.begin(slot)
        arena.slot_view(slot)[:] = bytes([version]) * NBYTES
        arena.complete(slot, version, TERM)
    yield arena
    arena.close()


@pytest.fixture
def serve(arena: Arena, run_id: str) -> Iterator[Callable[[SecurityConfig | None], PartServer]]:
    servers: list[PartServer] = []

    def start(security: SecurityConfig | None = None) -> PartServer:
        servers.append(PartServer(arena, PART, run_id, "127.0.0.1", security))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def wanted(run_id: str, version: int = OLD) -> pb.FetchRequest:
    return pb.FetchRequest(id=pb.VersionId(run_id=run_id, term=TERM, version=version), part=PART)


async def fetch(server: PartServer, request: pb.FetchRequest) -> AsyncIterator[memoryview]:
    async with rpc.connect(server.address) as channel:
        fetching = channel.unary_stream(
            "/polyreme.api.v1.WeightsService/Fetch", request_serializer=pb.FetchRequest.SerializeToString
        )
        async for message in fetching(request, timeout=300):
            yield decode_chunk(message)[1]


async def refusal(server: PartServer, request: pb.FetchRequest) -> grpc.StatusCode:
    """The status of a call that is refused before the first byte."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in fetch(server, request):
            raise AssertionError("bytes were sent")
    code: grpc.StatusCode = caught.value.code()
    return code


async def test_only_the_requested_version_is_sent(arena: Arena, serve: Callable[..., PartServer], run_id: str) -> None:
    server = serve()
    for version in (OLD, NEW):
        received = b"".join([bytes(data) async for data in fetch(server, wanted(run_id, version))])
        assert received == bytes([version]) * NBYTES
    others = [wanted("other-run"), wanted(run_id, NEW + 1), wanted(run_id), wanted(run_id), wanted(run_id), wanted(run_id, 0)]
    others[2].id.term = TERM - 1
    others[5].id.term = 0  # as in a slot that was never written
    others[3].part = PART + 1
    others[4].base.CopyFrom(others[4].id)
    others[4].base.version = OLD - 1
    for request in others:
        assert await refusal(server, request) is grpc.StatusCode.NOT_FOUND, request
    arena.begin(0)
    assert await refusal(server, wanted(run_id)) is grpc.StatusCode.NOT_FOUND


async def test_a_write_that_begins_while_the_slot_is_looked_up_ends_the_call(
    arena: Arena, serve: Callable[..., PartServer], run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = arena.version

    def version(slot: int) -> tuple[int, int]:
        answer = found(slot)
        if answer == (TERM, OLD):
            arena.begin(slot)
        return answer

    monkeypatch.setattr(arena, "version", version)
    assert await refusal(serve(), wanted(run_id)) is grpc.StatusCode.NOT_FOUND


async def test_a_fetch_ends_when_its_slot_is_written_again(arena: Arena, serve: Callable[..., PartServer], run_id: str) -> None:
    received = 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for data in fetch(serve(), wanted(run_id)):
            if not received:
                arena.begin(0)
            received += len(data)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND and 0 < received < NBYTES


async def test_another_token_is_refused_and_reported(
    serve: Callable[..., PartServer], run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PART_TOKEN", "of-this-machine")
    server = serve(TOKEN)
    await check_part_server(server.address, PART, TOKEN)
    assert await refusal(server, wanted(run_id)) is grpc.StatusCode.UNAUTHENTICATED
    monkeypatch.setenv("PART_TOKEN", "of-the-trainer")
    with pytest.raises(ConfigError) as caught:
        await check_part_server(server.address, PART, TOKEN)
    assert "PART_TOKEN" in caught.value.expected and server.address in caught.value.found
    assert "of-the-trainer" not in str(caught.value)


async def test_a_machine_that_cannot_be_reached_is_named(serve: Callable[..., PartServer]) -> None:
    server = serve()
    server.close()
    with pytest.raises(UnavailableError) as caught:
        await check_part_server(server.address, PART, None)
    assert server.address in caught.value.expected and "UNAVAILABLE" in caught.value.found
