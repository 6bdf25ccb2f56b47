"""Calls the given services over gRPC and HTTP without a token and with a wrong one. Only probes may succeed."""

import asyncio
import socket
import sys
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

METHODS = {
    "rollout": ("/polyreme.api.v1.RolloutService/Generate", "/polyreme.api.v1.WeightsService/Commit"),
    "environment": ("/polyreme.api.v1.EnvironmentService/Run",),
    "reward": ("/polyreme.api.v1.RewardService/Score", "/polyreme.api.v1.RewardService/ListRewards"),
}


def status(url: str, token: str | None) -> int:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


async def code(address: str, method: str, token: str | None) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            metadata = (("authorization", f"Bearer {token}"),) if token else ()
            if method.endswith("Generate"):
                async for _ in channel.unary_stream(method)(b"", timeout=5, metadata=metadata):
                    pass
            else:
                await channel.unary_unary(method)(b"", timeout=5, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
    return "OK"


async def knock(name: str) -> list[str]:
    host, opened = socket.gethostbyname(name), []
    for token in (None, "wrong"):
        opened += [
            f"{method} {found}"
            for method in METHODS[name]
            if (found := await code(f"{host}:50051", method, token)) != "UNAUTHENTICATED"
        ]
        opened += [
            f"{path} {found}"
            for path in ("metrics", "v1/models")
            if (found := status(f"http://{host}:8080/{path}", token)) != 401
        ]
    async with grpc.aio.insecure_channel(f"{host}:50051") as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    if (found := status(f"http://{host}:8080/health", None)) != 200:
        opened.append(f"/health {found}, not 200")
    return [f"{name}: {what}" for what in opened]


async def main() -> None:
    opened = [what for name in sys.argv[1:] for what in await knock(name)]
    print("\n".join(opened) or "closed")
    sys.exit(bool(opened))


if __name__ == "__main__":
    asyncio.run(main())
