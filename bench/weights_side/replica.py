"""Runs the receiving end of a stream without an engine: the real weights service on `HOST`, or one plain socket. Prints its port.

python -m weights_side.replica HOST stream|socket TENSORS BYTES RUN
"""

import asyncio
import mmap
import socket
import sys
from collections.abc import Sequence

from polyreme.net import rpc
from polyreme.process.lifecycle import stop_event
from polyreme.weights.manifest import ArenaSource
from polyreme_rollout.engine.protocol import LoadResult
from support.receiver import SERVICE, Receiver


async def serve(host: str, tensors: int, run: str) -> None:
    receiver = Receiver(run, names(tensors))

    async def load(_: Sequence[ArenaSource]) -> LoadResult:
        return LoadResult(0.0, 0.0, {})

    receiver.engine.load = load  # type: ignore[method-assign, assignment]  # only the way to it is measured
    async with rpc.serve(host, 0, receiver.add_to, [SERVICE]) as server:
        print(server.port, flush=True)
        await stop_event().wait()


def drain(host: str, size: int) -> None:
    """Repeatedly receives `size` bytes into the same memory, and answers each time with one byte."""
    target = memoryview(mmap.mmap(-1, size, mmap.MAP_SHARED | mmap.MAP_POPULATE))
    with socket.create_server((host, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        while True:
            got = 0
            while got < size:
                more = connection.recv_into(target[got:])
                if not more:
                    return
                got += more
            connection.sendall(b"x")


def names(tensors: int) -> list[str]:
    return [f"tensor{number}" for number in range(tensors)]


if __name__ == "__main__":
    host, kind, tensors, size, run = sys.argv[1:]
    if kind == "socket":
        drain(host, int(size))
    else:
        asyncio.run(serve(host, int(tensors), run))
