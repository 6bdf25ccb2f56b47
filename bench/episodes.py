"""The cost of episodes of several turns: one vLLM replica, environment servers in processes of their own, and the orchestrator's sessions.

    python bench/episodes.py [--only PART ...] [--rounds 3] [--sessions 2000] [--work runs/bench-peer]

tokens    tokens_vs_single_turn: sampled tokens per second of episodes of four turns, compared with single responses of as many tokens (>= 0.9);
          tokens_floor: the same of these turns at the replica alone, without sessions and environments: it reads what the environment says
requests  session_vs_engine: chat requests per second of agents through their session addresses, compared with the same requests at vLLM's
          own server in the replica (>= 0.9); session_cpu_vs_engine: the same of requests per CPU second of all processes, which other work on
          the machine changes less
tools     busy_with_slow_tools: sampled tokens per second with tools of two seconds and enough episodes in flight, compared with tools that
          take no time (>= 0.9), of agents; ..._coroutines and ..._threads: of a class in one worker process
prefill   prefill_vs_new: tokens that the engine computes before sampling, over those that are new in each turn (<= 1.1); prefill_floor: the
          same if only the last block of the cache, which is never shared, were computed again
sessions  session_growth_mib: growth of the environment server's memory from the second to the last round of --sessions open sessions (<= 8)
trl       episodes_vs_trl: episodes per second of training with a tool, compared with TRL's GRPOTrainer and its environments (>= 3);
          episodes_floor_vs_trl: the same if an iteration took only the engines' tokens, in as many requests as turns, the learner's step and
          the weights, one after the other in one process, without tools and services

A part's sides run in turn, --rounds times after one that does not count, on the same machine; a ratio is the median of its turns.
"""

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # torch reads it when it is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import psutil  # type: ignore[import-untyped]
from episodes_side.agents import Agents, agent_client
from episodes_side.prefill import prefill_alone
from episodes_side.stack import GROUP, GROUPS, SEQS, TOKENS, TOOL_SECONDS, TURNS, Side, Stack, open_stack, sampled_tokens
from episodes_side.training import episodes_vs_trl
from rollout import demo_model

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.experience.leases import Lease
from polyreme.net import rpc
from polyreme.process.event_loop import run_service
from polyreme.process.lifecycle import Child, freeze_gc
from support.replicas import Replica
from support.tiny_tokenizer import vocabulary

ROOT = Path(__file__).resolve().parents[1]
BUSY = ("busy_with_slow_tools", "busy_with_slow_coroutines", "busy_with_slow_threads")
LEAST = {"tokens_vs_single_turn": 0.9, "session_vs_engine": 0.9, **dict.fromkeys(BUSY, 0.9), "episodes_vs_trl": 3.0}
MOST = {"prefill_vs_new": 1.1, "session_growth_mib": 8.0}
STACKED = ("tokens", "tools", "requests", "sessions")
PARTS = ("prefill", *STACKED, "trl")
IN_FLIGHT, MOST_IN_FLIGHT = 16, 192  # groups
WARM_UP, WINDOW = 15.0, 20.0  # seconds


async def timed(work: Awaitable[Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = await work
    return time.perf_counter() - began, result


async def tokens_vs_single_turn(side: Side, rounds: int) -> dict[str, float]:
    ratios: dict[str, list[float]] = {"tokens_vs_single_turn": [], "tokens_floor": []}
    for number in range(rounds + 1):
        seconds, played = await timed(asyncio.gather(*(side.play(place) for place in range(GROUPS))))
        tokens = sum(sample.sampled_tokens for samples in played for sample in samples)
        mean = round(tokens / (GROUP * GROUPS))
        least, _ = await timed(asyncio.gather(*(side.repeat(place, samples) for place, samples in enumerate(played))))
        alone, _ = await timed(asyncio.gather(*(side.answer(place, mean) for place in range(GROUPS))))
        rates = [tokens / seconds, tokens / least, mean * GROUP * GROUPS / alone]
        print("turns {:.0f} tokens/s, at the replica alone {:.0f}; single responses {:.0f}".format(*rates), flush=True)
        if number:
            ratios["tokens_vs_single_turn"].append(rates[0] / rates[2])
            ratios["tokens_floor"].append(rates[1] / rates[2])
    return {name: statistics.median(found) for name, found in ratios.items()}


async def rate_in_flight(side: Side, there: Replica, first: int, groups: int) -> float:
    """Tokens per second while so many groups are in flight."""

    async def keep_playing(place: int) -> None:
        while True:
            await side.play(first + place % GROUPS)

    playing = [asyncio.create_task(keep_playing(place)) for place in range(groups)]
    try:
        await asyncio.sleep(WARM_UP)
        before, began = await sampled_tokens(there), time.perf_counter()
        await asyncio.sleep(WINDOW)
        rate = (await sampled_tokens(there) - before) / (time.perf_counter() - began)
    finally:
        for task in playing:
            task.cancel()
        ended = await asyncio.gather(*playing, return_exceptions=True)
    for failed in (each for each in ended if isinstance(each, Exception)):
        raise failed
    return rate


def enough_in_flight(rate: float) -> int:
    """Groups that keep a replica busy which samples so many tokens per second, with half as many again: an episode waits for its tools, and is
    sampled for as long as its tokens take in a full batch."""
    tokens = TURNS * TOKENS
    seconds = (TURNS - 1) * TOOL_SECONDS + tokens * SEQS / rate
    return min(MOST_IN_FLIGHT, math.ceil(1.5 * rate * seconds / tokens / GROUP))


async def busy(name: str, side: Side, there: Replica, rounds: int) -> float:
    ratios = []
    for _ in range(rounds):
        quick = await rate_in_flight(side, there, 0, IN_FLIGHT)
        groups = enough_in_flight(quick)
        slow = await rate_in_flight(side, there, GROUPS, groups)
        print(f"{name}: {quick:8.0f} tokens/s, with slow tools {slow:8.0f} tokens/s ({groups} groups in flight)", flush=True)
        ratios.append(slow / quick)
    return statistics.median(ratios)


def cpu_seconds(processes: Mapping[str, Sequence[psutil.Process]]) -> dict[str, float]:
    return {name: sum(sum(each.cpu_times()[:2]) for each in those) for name, those in processes.items()}


def with_children(child: Child) -> list[psutil.Process]:
    top = psutil.Process(child.pid)
    return [top, *top.children(recursive=True)]


async def session_vs_engine(side: Side, agents: Agents, child: Child, there: Replica, rounds: int) -> dict[str, float]:
    """Every request is a conversation of its own on both sides, so both encode and sample the same."""
    url = f"http://{there.lease.http_address}/v1"
    ratios: dict[str, list[float]] = {"session_vs_engine": [], "session_cpu_vs_engine": []}
    processes = {"clients and orchestrator": [psutil.Process()]}
    processes |= {"environment server": with_children(child), "replica": with_children(there.child)}
    async with agent_client() as client:
        agents.model = (await client.get(f"{url}/models")).json()["data"][0]["id"]  # a session takes any
    agents.plays = False
    agents.hold.set()
    for number in range(rounds + 1):
        rates, costs = [], []
        sides: tuple[Callable[[], list[Awaitable[Any]]], ...] = (
            lambda: [side.play(place) for place in range(GROUPS)],
            lambda: [agents.talk(url, "none") for _ in range(GROUP * GROUPS)],
        )
        for work in sides:
            before, spent = agents.requests, cpu_seconds(processes)
            seconds, _ = await timed(asyncio.gather(*work()))
            requests = agents.requests - before
            rates.append(requests / seconds)
            costs.append({name: (after - spent[name]) / requests for name, after in cpu_seconds(processes).items()})
        for name, rate, cost in zip(("sessions", "vLLM's own server"), rates, costs, strict=True):
            parts = ", ".join(f"{part} {1000 * each:.2f}" for part, each in cost.items())
            print(f"{name:18} {rate:8.1f} requests/s; CPU {1000 * sum(cost.values()):.2f} ms/request ({parts})", flush=True)
        if number:
            ratios["session_vs_engine"].append(rates[0] / rates[1])
            ratios["session_cpu_vs_engine"].append(sum(costs[1].values()) / sum(costs[0].values()))
    return {name: statistics.median(found) for name, found in ratios.items()}


async def session_growth(child: Child, lease: Lease, agents: Agents, sessions: int, rounds: int) -> tuple[float, float]:
    """Growth in MiB over the rounds after the first one, and the KiB of an open session."""
    process, peaks, idle = psutil.Process(child.pid), [], 0.0
    async with rpc.connect(lease.address) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        for _ in range(rounds + 2):
            agents.hold.clear()
            agents.held, idle = 0, idle or process.memory_info().rss
            calls = [stub.Run() for _ in range(sessions)]
            for call in calls:
                await call.write(pb.RunRequest(start=pb.Start(row_json="{}", seed=1)))
            ends = [asyncio.ensure_future(call.read()) for call in calls]
            while agents.held < sessions:
                await asyncio.sleep(0.05)  # they come over HTTP
                if ended := [end.result() for end in ends if end.done()]:
                    raise RuntimeError(f"expected sessions that stay open; found one that ended: {ended[0]}")
            peaks.append(process.memory_info().rss)
            agents.hold.set()
            await asyncio.gather(*ends)
            print(f"{sessions} sessions: {peaks[-1] / 2**20:.1f} MiB", flush=True)
    return (peaks[-1] - peaks[1]) / 2**20, (peaks[0] - idle) / sessions / 1024


async def measure(options: argparse.Namespace, folder: Path, model: Path) -> dict[str, float]:
    measured: dict[str, float] = {}
    async with AsyncExitStack() as exits:
        stack: Stack = await open_stack(exits, folder, model)
        agents = Agents()
        url = await agents.serve(exits)
        talking, child, lease = await stack.side("agents", {"url": url, "max_turns": 24})
        freeze_gc()  # as an orchestrator
        if "tokens" in options.only:
            side, _, _ = await stack.side("Talk", {"max_turns": TURNS})
            measured |= await tokens_vs_single_turn(side, options.rounds)
        if "tools" in options.only:
            agents.hold.set()
            measured[BUSY[0]] = await busy("agents", talking, stack.replica, options.rounds)
            for name, kind in zip(BUSY[1:], ("Coroutines", "Threads"), strict=True):
                side, _, _ = await stack.side(kind, {"max_turns": TURNS, "worker_calls": GROUP * MOST_IN_FLIGHT})
                measured[name] = await busy(kind, side, stack.replica, options.rounds)
        if "requests" in options.only:
            measured |= await session_vs_engine(talking, agents, child, stack.replica, options.rounds)
        if "sessions" in options.only:
            growth, each = await session_growth(child, lease, agents, options.sessions, options.rounds)
            measured |= {"session_growth_mib": growth, "session_kib": each}
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "bench-peer")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = demo_model(folder / "model", 2048, len(vocabulary()))
        found = prefill_alone(folder, model) if "prefill" in options.only else {}
        if set(options.only) & set(STACKED):
            found |= run_service(measure(options, folder, model))  # as an orchestrator
    if "trl" in options.only:
        found |= episodes_vs_trl(options.work.resolve(), options.rounds)
    measured = {key: round(value, 3) for key, value in found.items()}
    met = all(found[key] >= least for key, least in LEAST.items() if key in found)
    met &= all(found[key] <= most for key, most in MOST.items() if key in found)
    print(json.dumps({"bench": "episodes", "measured": measured, "target": LEAST | MOST, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
