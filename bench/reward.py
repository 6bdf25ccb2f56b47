"""Items per second through the reward service: a trivial rule over gRPC, in batches of 256, server and client on the same cores.

Beside it, what the wire alone costs: the same messages through a servicer that scores nothing.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from polyreme import rpc
from polyreme.api.v1 import experience_pb2, reward_pb2, reward_pb2_grpc

BATCH = 256
IN_FLIGHT = 4
BATCHES = 400
TARGET = 20_000


def requests(count: int) -> list[reward_pb2.ScoreRequest]:
    """Batches of responses of a few hundred characters, every key new."""
    text = "b8+5=3,c3+3=6,d9+6=5," * 12
    return [
        reward_pb2.ScoreRequest(
            run_id="bench",
            items=[
                reward_pb2.ScoreItem(
                    key=f"{batch:08x}{item:024x}",
                    prompt="a5b8c3d9=",
                    response=f"{text}#{item % 10}",
                    label="5",
                    metadata_json='{"row": 1}',
                )
                for item in range(BATCH)
            ],
        )
        for batch in range(count)
    ]


async def rate(address: str) -> float:
    """Items per second over BATCHES batches, IN_FLIGHT at a time."""
    async with rpc.connect(address) as channel:
        score = reward_pb2_grpc.RewardServiceStub(channel).Score
        batches = iter(requests(BATCHES + 1))
        await score(next(batches), timeout=30)

        async def caller() -> None:
            for batch in batches:
                reply = await score(batch, timeout=30)
                assert [result.status for result in reply.results] == [reward_pb2.SCORE_STATUS_OK] * BATCH

        begin = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
        return BATCHES * BATCH / (time.perf_counter() - begin)


async def in_process(argv: list[str], measure: Callable[[str], Awaitable[float]]) -> float:
    """Starts a server that prints or logs its address in a process of its own, measures, ends it."""
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        line = ""
        async with asyncio.timeout(30):
            while "gRPC at " not in line:
                line = (await process.stderr.readline()).decode()
        return await measure(line.partition("gRPC at ")[2].split(",")[0].strip())
    finally:
        process.terminate()
        await process.wait()


class Echo(reward_pb2_grpc.RewardServiceServicer):
    """Answers with as many results as there were items, and looks at none."""

    async def Score(self, request, context):
        part = experience_pb2.RewardPart(name="exact", raw=1.0, weighted=1.0, plugin_version="exact-0.1.0-00000000")
        results = [reward_pb2.ScoreResult(key=i.key, status=1, score=1.0, parts=[part]) for i in request.items]
        return reward_pb2.ScoreResponse(results=results)


async def serve_echo() -> None:
    add = lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(Echo(), server)  # noqa: E731
    async with rpc.serve("127.0.0.1", 0, add, ["polyreme.api.v1.RewardService"]) as server:
        await server.set_ready(True)
        print(f"gRPC at 127.0.0.1:{server.port},", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


async def main() -> None:
    config = Path(__file__).with_name("reward.yaml")
    service = [sys.executable, "-m", "polyreme", "reward", "--config", str(config)]
    echo = [sys.executable, __file__, "echo"]
    ours, wire = [], []
    for _ in range(3):  # alternating, so that other load hits both
        ours.append(await in_process(service, rate))
        wire.append(await in_process(echo, rate))
    items, floor = statistics.median(ours), statistics.median(wire)
    print("| over gRPC, batches of 256 | items/s | share of the wire |")
    print("|---|---|---|")
    print(f"| the wire alone | {floor:,.0f} | 1.00 |")
    print(f"| exact match | {items:,.0f} | {items / floor:.2f} |")
    measured = {"items_per_second": round(items), "service_vs_wire": round(items / floor, 3)}
    print(json.dumps({"bench": "reward", "measured": measured, "target": {"items_per_second": TARGET}, "met": items >= TARGET}))


if __name__ == "__main__":
    asyncio.run(serve_echo() if sys.argv[1:] == ["echo"] else main())
