"""The cost of the reward service, with server and client on the same cores, compared with the transport alone, direct calls and plain HTTP.

* A trivial rule over gRPC in batches of 256, compared with the same messages through a servicer that scores nothing: `service_vs_wire`
  (>= 0.15), a ratio of items per second.
* math-verify through the service, compared with direct calls in as many processes: `math_vs_bare` (>= 0.85), a ratio of items per second.
* An HTTP reward: the latency of one item through the service, compared with a client that calls the endpoint directly.
* A program's sandbox: an empty program from start to end, compared with its parts: bubblewrap, and a Python that compiles and runs nothing.
  `sandbox_vs_parts` (<= 1.2) is the ratio of the median times.
* 10,000 items in flight that wait for workers or an HTTP endpoint: `flight_mib` (<= 256), the memory that they add to the service's processes.
"""

import asyncio
import json
import logging
import multiprocessing
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]

from polyreme.api.v1 import experience_pb2, reward_pb2, reward_pb2_grpc
from polyreme.isolation.sandbox import bubblewrap, seccomp
from polyreme.isolation.sandbox.modes import choose
from polyreme.isolation.sandbox.program import Limits, Mode
from polyreme.isolation.sandbox.run import run
from polyreme.net import rpc

BATCH = 256
IN_FLIGHT = 4
BATCHES = 400
PROCESSES = 2
MATH_ITEMS = 4096
CALLS = 2000
STARTS = 100
HELD = 10_000
HELD_CHARS = 4096
LEAST = {"service_vs_wire": 0.15, "math_vs_bare": 0.85}
MOST = {"sandbox_vs_parts": 1.2, "flight_mib": 256.0}


@dataclass(frozen=True)
class Service:
    """A server in a separate process."""

    pid: int
    grpc: str
    http: str


@asynccontextmanager
async def in_process(argv: Sequence[str]) -> AsyncIterator[Service]:
    """Starts a server that reports its addresses on stderr, and stops it at the end of the block."""
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(60):
            said = ""
            while not (found := re.search(r"gRPC at ([^,\s]+)(?:, HTTP at (\S+))?", said)):
                line = (await process.stderr.readline()).decode()
                assert line, f"{argv} ended: {said}"
                said += line
        yield Service(process.pid, found[1], found[2] or "")
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def rewards(folder: Path, **reward: object) -> AsyncIterator[Service]:
    """Runs `polyreme reward` with one reward."""
    path = folder / f"{time.monotonic_ns()}.yaml"
    path.write_text(json.dumps({"reward": {"rewards": [reward], "workers": PROCESSES, "item_timeout": 120.0}}))
    async with in_process([sys.executable, "-m", "polyreme", "reward", "--config", str(path)]) as service:
        yield service


def batches(items: Sequence[tuple[str, str]], name: str) -> Iterator[reward_pb2.ScoreRequest]:
    """Yields requests of BATCH items each, from (response, label). Every key is new."""
    for start in range(0, len(items), BATCH):
        asked = [
            reward_pb2.ScoreItem(
                key=f"{name}-{start + n:024x}", prompt="a5b8c3d9=", response=response, label=label, metadata_json='{"row": 1}'
            )
            for n, (response, label) in enumerate(items[start : start + BATCH])
        ]
        yield reward_pb2.ScoreRequest(run_id="bench", items=asked)


async def rate(address: str, items: Sequence[tuple[str, str]]) -> float:
    """Returns items per second with IN_FLIGHT batches at a time."""
    async with rpc.connect(address) as channel:
        score = reward_pb2_grpc.RewardServiceStub(channel).Score
        await score(next(batches(items[:BATCH], "warm")), timeout=60)
        waiting = iter(list(batches(items, f"rate-{time.monotonic_ns()}")))  # a repeated key would be answered from the cache

        async def caller() -> None:
            for batch in waiting:
                reply = await score(batch, timeout=120)
                found = [(result.status, result.score) for result in reply.results]
                assert found == [(reward_pb2.SCORE_STATUS_OK, 1.0)] * len(batch.items), found[:5]

        begin = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
        return len(items) / (time.perf_counter() - begin)


def trivial() -> list[tuple[str, str]]:
    """Responses of a few hundred characters whose answer is exactly the label."""
    text = "b8+5=3,c3+3=6,d9+6=5," * 12
    return [(f"{text}#{n % 10}", str(n % 10)) for n in range(BATCHES * BATCH)]


def mathematics() -> list[tuple[str, str]]:
    """Responses with a boxed answer, equal to the label but not always written like it."""
    forms: list[Callable[[int], tuple[str, str]]] = [
        lambda n: (str(n), str(n)),
        lambda n: (rf"\frac{{{2 * n}}}{{{2 * n + 2}}}", rf"\frac{{{n}}}{{{n + 1}}}"),
        lambda n: (f"{n}x + {n}", f"{n}(x+1)"),
        lambda n: (rf"\sqrt{{{n * n * 2}}}", rf"{n}\sqrt{{2}}"),
    ]
    pairs = [forms[n % len(forms)](n + 2) for n in range(MATH_ITEMS)]  # every label is new, since a worker keeps parsed labels
    return [(rf"We simplify step by step and find the answer. It is $\boxed{{{answer}}}$.", label) for answer, label in pairs]


def bare(items: Sequence[tuple[str, str]]) -> int:
    """Returns the number of equal answers by math-verify, called as in the rule `math`. Its timeouts are off, since they only add cost."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    of_label = [LatexExtractionConfig(), ExprExtractionConfig()]
    of_response = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return sum(
        verify(
            parse(f"${label}$", of_label, parsing_timeout=None),
            parse(response, of_response, parsing_timeout=None),
            timeout_seconds=None,
        )
        for response, label in items
    )


@contextmanager
def bare_processes() -> Iterator[Callable[[Sequence[tuple[str, str]]], float]]:
    """Yields a function that returns items per second of direct calls in PROCESSES warm processes, which get small chunks when idle."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:

        def measure(items: Sequence[tuple[str, str]]) -> float:
            chunks = [items[start : start + 32] for start in range(0, len(items), 32)]
            pool.map(bare, chunks[:4], chunksize=1)
            begin = time.perf_counter()
            right = sum(pool.imap_unordered(bare, chunks))
            assert right == len(items), (right, len(items))
            return len(items) / (time.perf_counter() - begin)

        yield measure


async def mathematics_rates(folder: Path) -> tuple[float, float]:
    """Returns items per second of math-verify through the service, and by direct calls."""
    items, ours, theirs = mathematics(), [], []
    with bare_processes() as measure:
        async with rewards(folder, name="math") as service:
            for _ in range(3):  # alternating, so that other load hits both
                ours.append(await rate(service.grpc, items))
                theirs.append(await asyncio.to_thread(measure, items))
    return statistics.median(ours), statistics.median(theirs)


async def latencies(ask: Callable[[int], Awaitable[object]]) -> tuple[float, float]:
    """Returns p50 and p99 of CALLS sequential calls, in milliseconds."""
    times = []
    for number in range(CALLS + 50):
        begin = time.perf_counter()
        await ask(number)
        times.append(1000 * (time.perf_counter() - begin))
    cuts = statistics.quantiles(times[50:], n=100)
    return cuts[49], cuts[98]


async def http_latencies(endpoint: Service, service: Service) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns (p50, p99) of one item from the endpoint over HTTP, and from the service that calls it over gRPC, in milliseconds."""
    async with rpc.connect(service.grpc) as channel, httpx.AsyncClient(trust_env=False) as client:
        score = reward_pb2_grpc.RewardServiceStub(channel).Score

        async def direct(number: int) -> None:
            body = {"src": ["p"], "tgt": ["5"], "response": [f"{number}#5"]}
            reply = await client.post(endpoint.http, json=body)
            assert reply.json()["score"] == [1.0], reply.text

        async def through(number: int) -> None:
            item = reward_pb2.ScoreItem(key=f"call-{number}", prompt="p", response=f"{number}#5", label="5")
            reply = await score(reward_pb2.ScoreRequest(run_id="bench", items=[item]), timeout=30)
            assert reply.results[0].score == 1.0, reply

        return await latencies(direct), await latencies(through)


async def flight_mib(service: Service, name: str) -> float:
    """Returns the MiB that HELD items in flight at once would add to the service's processes: in proportion to the most that were."""
    everyone = [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]

    def memory() -> float:
        return sum(process.memory_full_info().pss for process in everyone) / 2**20

    text = "9" * HELD_CHARS
    items = [(f"{text}#\\boxed{{5}}" if name == "math" else f"{text}#5", "5")] * HELD
    before = memory()
    inside, peak = 0, before
    async with rpc.connect(service.grpc) as channel, httpx.AsyncClient(trust_env=False, timeout=60) as client:
        score = reward_pb2_grpc.RewardServiceStub(channel).Score
        calls = asyncio.gather(*(score(batch, timeout=150) for batch in batches(items, name)))
        while not calls.done():
            shown = (await client.get(f"{service.http}metrics")).text
            inside = max(inside, int(float(re.search(r"^polyreme_reward_items_inside (\S+)", shown, re.M)[1])))  # type: ignore[index]
            peak = max(peak, memory())
            await asyncio.sleep(0.05)
        for reply in await calls:
            assert [(r.status, r.score) for r in reply.results] == [(reward_pb2.SCORE_STATUS_OK, 1.0)] * len(reply.results)
    # The first items are scored before the last ones arrive, on a busy machine many of them.
    assert inside > 0.5 * HELD, f"expected about {HELD} items in flight at once; found {inside}"
    return (peak - before) * HELD / inside


class Echo(reward_pb2_grpc.RewardServiceServicer):
    """Answers with one result per item, without reading any."""

    async def Score(self, request: reward_pb2.ScoreRequest, context: object) -> reward_pb2.ScoreResponse:
        part = experience_pb2.RewardPart(name="exact", raw=1.0, weighted=1.0, plugin_version="exact-0.1.0-00000000")
        results = [
            reward_pb2.ScoreResult(key=i.key, status=reward_pb2.SCORE_STATUS_OK, score=1.0, parts=[part]) for i in request.items
        ]
        return reward_pb2.ScoreResponse(results=results)


async def serve_echo() -> None:
    add = lambda server: reward_pb2_grpc.add_RewardServiceServicer_to_server(Echo(), server)  # noqa: E731
    async with rpc.serve("127.0.0.1", 0, add, ["polyreme.api.v1.RewardService"]) as server:
        await server.set_ready(True)
        print(f"gRPC at 127.0.0.1:{server.port}", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


async def wire_rates(folder: Path) -> tuple[float, float]:
    """Returns items per second of exact match through the service, and of the transport alone."""
    items, ours, wire = trivial(), [], []
    for _ in range(3):  # alternating, so that other load hits both
        async with rewards(folder, name="exact", options={"after": "#"}) as service:
            ours.append(await rate(service.grpc, items))
        async with in_process([sys.executable, __file__, "echo"]) as echo:
            wire.append(await rate(echo.grpc, items))
    return statistics.median(ours), statistics.median(wire)


def sandbox_starts() -> tuple[Mode, float, float]:
    """Returns the sandbox mode of this machine, and the median milliseconds of an empty program in it and of its parts alone."""
    mode, limits = choose(unsafe=True), Limits(seconds=10.0, memory_mib=256)
    ours, parts = [], []
    for _ in range(STARTS):  # alternating, so that other load hits both
        begin = time.perf_counter()
        assert run(mode, {"kind": "script", "program": "pass"}, "", limits).well
        ours.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        start_parts(mode)
        parts.append(time.perf_counter() - begin)
    return mode, 1e3 * statistics.median(ours), 1e3 * statistics.median(parts)


def start_parts(mode: Mode) -> None:
    """Runs Python on an empty program, in plain bubblewrap if that is the mode, otherwise without isolation."""
    line = [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", "exec(compile('', 'program.py', 'exec'))"]
    with tempfile.TemporaryFile() as filter_file, tempfile.TemporaryFile() as info:
        if mode is Mode.BUBBLEWRAP:
            line[0] = str(Path(sys.executable).resolve())  # a virtual environment's link is not mounted
            filter_file.write(seccomp.filter_of(attributes=True))
            filter_file.seek(0)
            bwrap = bubblewrap.executable()
            assert bwrap is not None
            line = bubblewrap.command(bwrap, [sys.base_prefix], 32 << 20, filter_file.fileno(), info.fileno()) + line
        subprocess.run(line, pass_fds=[filter_file.fileno(), info.fileno()], check=True)


async def main(folder: Path) -> bool:
    mode, start, parts = sandbox_starts()
    items, floor = await wire_rates(folder)
    math, calls = await mathematics_rates(folder)
    async with (
        rewards(folder, name="exact", options={"after": "#"}) as endpoint,
        rewards(folder, name="remote", url=endpoint.http, protocol="paddlenlp") as service,
    ):
        direct, through = await http_latencies(endpoint, service)
        over_http = await flight_mib(service, "http")
    async with rewards(folder, name="math") as service:
        over_workers = await flight_mib(service, "math")
    p50, p99 = (ours - theirs for ours, theirs in zip(through, direct, strict=True))
    print("| over gRPC, batches of 256 | items/s | share |")
    print("|---|---|---|")
    print(f"| the transport alone | {floor:,.0f} | 1.00 |")
    print(f"| exact match | {items:,.0f} | {items / floor:.2f} |")
    print(f"| math-verify, bare, {PROCESSES} processes | {calls:,.0f} | 1.00 |")
    print(f"| math-verify, {PROCESSES} workers | {math:,.0f} | {math / calls:.2f} |")
    print("\n| one item over HTTP | p50 ms | p99 ms |")
    print("|---|---|---|")
    print(f"| the endpoint alone | {direct[0]:.2f} | {direct[1]:.2f} |")
    print(f"| through the service | {through[0]:.2f} | {through[1]:.2f} |")
    print(
        f"\n{HELD:,} items of {HELD_CHARS:,} characters in flight: {over_workers:.0f} MiB (workers), {over_http:.0f} MiB (HTTP)"
    )
    print(f"\nan empty program: {start:.1f} ms in a sandbox ({mode}), {parts:.1f} ms for its parts alone")
    measured = {
        "sandbox_start_ms": round(start, 1),
        "sandbox_parts_ms": round(parts, 1),
        "sandbox_vs_parts": round(start / parts, 3),
        "items_per_second": round(items),
        "service_vs_wire": round(items / floor, 3),
        "math_vs_bare": round(math / calls, 3),
        "http_added_p50_ms": round(p50, 2),
        "http_added_p99_ms": round(p99, 2),
        "flight_mib": round(max(over_workers, over_http), 1),
    }
    met = all(measured[name] >= least for name, least in LEAST.items())
    met &= all(measured[name] <= most for name, most in MOST.items())
    print(json.dumps({"bench": "reward", "measured": measured, "target": LEAST | MOST, "met": met}))
    return met


if __name__ == "__main__":
    if sys.argv[1:] == ["echo"]:
        asyncio.run(serve_echo())
    else:
        with tempfile.TemporaryDirectory(prefix="polyreme-bench-") as name:
            raise SystemExit(0 if asyncio.run(main(Path(name))) else 1)
