"""The cost of episodes of several turns: one vLLM replica, environment servers in processes of their own, and the orchestrator's sessions.

    python bench/episodes.py [--rounds 3] [--sessions 2000] [--parts PART ...]

tokens_vs_single_turn  sampled tokens per second of episodes of four turns, compared with single responses of as many tokens (>= 0.9)
session_vs_engine      chat requests per second of agents through their session addresses, compared with the same requests at vLLM's own
                       server in the replica (>= 0.9)
busy_with_slow_tools   sampled tokens per second of agents with tools of two seconds and enough episodes in flight, compared with none (>= 0.9).
                       (Of a class, the methods of a worker process run one after the other, so its waiting tools need as many workers.)
prefill_vs_new         tokens that the engine computes before sampling, over those that are new in each turn (<= 1.1)
prefill_floor          the same if only the last block of the cache, which is never shared, were computed again
session_growth_mib     growth of the environment server's memory from the second to the last round of --sessions open sessions (<= 8)

With --parts, only some of them run: prefill, tokens, tools, requests, sessions. All sides run in turn within one run, on the same machine.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # torch reads it when it is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import httpx
import psutil  # type: ignore[import-untyped]
from rollout import demo_model, with_tokenizer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.config.load import parse_config
from polyreme.config.run import RunConfig
from polyreme.experience.embedded_redis import EmbeddedServer
from polyreme.experience.leases import Lease, Registry
from polyreme.experience.ledger import Admission, ExperienceLog, Writer
from polyreme.experience.run import Run, RunState
from polyreme.net import rpc
from polyreme.net.http_server import serve_http
from polyreme.process.lifecycle import Child
from polyreme_rollout.engine.vllm import start
from polyreme_rollout.engine.vllm_arguments import CPU_BLOCK_TOKENS
from polyreme_trainer.data.prompts import load_prompts
from polyreme_trainer.data.tail import Tail
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.environment.environment_client import EnvironmentClient
from polyreme_trainer.orchestrator.environment.episodes import Episodes
from polyreme_trainer.orchestrator.environment.protocol import Task
from polyreme_trainer.orchestrator.environment.session import Bounds
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.sampler import Sampler
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool
from polyreme_trainer.orchestrator.scoring.scoring import Scoring
from support.replicas import Learner, Replica, hf_weights, model_files, replica
from support.tiny_tokenizer import vocabulary

LEAST = {"tokens_vs_single_turn": 0.9, "session_vs_engine": 0.9, "busy_with_slow_tools": 0.9}
MOST = {"prefill_vs_new": 1.1, "session_growth_mib": 8.0}
PARTS = ("prefill", "tokens", "tools", "requests", "sessions")
RUN_ID = "bench-episodes"
TURNS, TOKENS, CONTEXT, SEQS = 4, 32, 512, 64
GROUP, GROUPS = 8, 8
TOOL_SECONDS = 2.0
IN_FLIGHT, IN_FLIGHT_SLOW = 16, 48  # groups
WINDOW = 20.0  # seconds
REQUESTS = 24  # of one agent
MESSAGE = 256  # tokens of a message, for the engine's cache
TALK = """
class Talk:
    def reset(self, row, seed):
        self.said = 0
    def step(self, message):
        self.said += 1
        return "go on, say more", 0.0, self.said == %d
"""


def configured(folder: Path, model: Path, environment: dict[str, Any]) -> RunConfig:
    rows = [
        {"prompt": f"say something {number}", "answer": str(seconds)}
        for seconds in (0.0, TOOL_SECONDS)
        for number in range(GROUPS)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rollout = {"max_new_tokens": TOKENS, "max_model_len": CONTEXT, "max_num_seqs": SEQS, "vllm": {"kv_cache_mib": 512}}
    tree = {
        "name": "episodes",
        "iterations": 1,
        "groups_per_iteration": GROUPS,
        "group_size": GROUP,
        "model": {"path": str(model)},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 64},
        "rollout": rollout,
        "reward": None,
        "environment": {"episodes": 100_000, "max_seconds": 3600.0, **environment},
        "trainer": {"optimizer": {"lr": 1.0}},
    }
    return parse_config(tree, "the bench")


@asynccontextmanager
async def environment_process(url: str, run: Run, log: Path) -> AsyncIterator[tuple[Child, Lease]]:
    command = [sys.executable, "-m", "polyreme", "environment", "--redis", url, "--run", run.run_id]
    child = Child.spawn("environment", command, log_path=log)
    try:
        [lease] = await Registry(run).wait_for("environment", 1, 120, alive=lambda: child.poll() is None)
        yield child, lease
    finally:
        await child.stop(60)


@dataclass
class Side:
    """What the orchestrator has: a sampler over the replica, and episodes at one environment server."""

    sampler: Sampler
    episodes: Episodes
    tasks: list[Task]

    async def play(self, place: int) -> tuple[int, int]:
        """Samples and tokens of a group."""
        played = await self.episodes.play(self.tasks[place])
        return len(played.samples), sum(sample.sampled_tokens for sample in played.samples)

    async def answer(self, place: int, tokens: int) -> None:
        """Single responses of so many tokens each."""
        task = self.tasks[place]
        wanted = replace(self.sampler.of_group(task.admission, task.prompt.ids), max_new=tokens, stop_ids=())
        await self.sampler.sample(wanted)


async def side_of(stack: AsyncExitStack, run: Run, config: RunConfig, model: Path, pool: ReplicaPool) -> Side:
    assert config.environment is not None
    template = Template(model_files(model), config.data)
    sampler = Sampler(RUN_ID, config, template, pool)
    client = EnvironmentClient(run, config.environment, config.data, 0)
    stack.push_async_callback(client.close)
    await client.refresh()
    bounds = Bounds(config.environment.max_turns, CONTEXT, 3600.0)
    log = PartialRolloutLog(ExperienceLog(run), interval=3600.0)
    prompts = load_prompts(config.data.train, config.data, template).prompts
    tasks = [Task(Admission(index, 1, 0), prompt) for index, prompt in enumerate(prompts)]
    return Side(sampler, Episodes(sampler, Tail(template), client, log, bounds, 3, Scoring(None, None)), tasks)


async def timed(work: Awaitable[Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = await work
    return time.perf_counter() - began, result


async def tokens_vs_single_turn(side: Side, rounds: int) -> float:
    ratios = []
    for number in range(rounds + 1):
        seconds, played = await timed(asyncio.gather(*(side.play(place) for place in range(GROUPS))))
        tokens = sum(each for _, each in played)
        mean = round(tokens / sum(count for count, _ in played))
        alone, _ = await timed(asyncio.gather(*(side.answer(place, mean) for place in range(GROUPS))))
        rates = tokens / seconds, mean * GROUP * GROUPS / alone
        print(f"turns {rates[0]:8.0f} tokens/s   single responses {rates[1]:8.0f} tokens/s", flush=True)
        ratios += [rates[0] / rates[1]] if number else []
    return statistics.median(ratios)


async def sampled(there: Replica) -> float:
    async with httpx.AsyncClient(trust_env=False) as client:
        lines = (await client.get(f"http://{there.lease.http_address}/metrics")).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("polyreme_rollout_tokens_total"))


async def rate_in_flight(side: Side, there: Replica, first: int, groups: int) -> float:
    """Tokens per second while so many groups are in flight."""

    async def keep_playing(place: int) -> None:
        while True:
            await side.play(first + place % GROUPS)

    playing = [asyncio.create_task(keep_playing(place)) for place in range(groups)]
    await asyncio.sleep(WINDOW / 2)
    seconds, before, began = WINDOW, await sampled(there), time.perf_counter()
    await asyncio.sleep(seconds)
    rate = (await sampled(there) - before) / (time.perf_counter() - began)
    for task in playing:
        task.cancel()
    await asyncio.gather(*playing, return_exceptions=True)
    return rate


class Agents:
    """A program that agents run in: each asks for chat completions, one after the other."""

    def __init__(self) -> None:
        self.requests, self.hold, self.plays, self.model = 0, asyncio.Event(), True, "policy"
        self.held = 0
        self.client = httpx.AsyncClient(timeout=600.0, limits=httpx.Limits(max_connections=None), trust_env=False)

    async def run(self, request: Request) -> Response:
        body = await request.json()
        if self.hold.is_set():
            where = body["base_url"], body["api_key"]
            try:
                return JSONResponse(await (self.play(*where, float(body["task"]["answer"])) if self.plays else self.talk(*where)))
            except httpx.HTTPStatusError as error:
                if error.response.status_code != 401:
                    raise
                return Response(status_code=410)  # the bench has given up this episode
        self.held += 1
        await self.hold.wait()
        return JSONResponse(0.0)

    async def talk(self, url: str, key: str) -> float:
        """Asks many times for a first answer."""
        for number in range(REQUESTS):
            await self._ask(url, key, [{"role": "user", "content": f"say something {number}"}], 8)
        return 0.0

    async def play(self, url: str, key: str, seconds: float) -> float:
        """One conversation of several turns, with a tool that takes so long between two of them."""
        messages = [{"role": "user", "content": "say something"}]
        for turn in range(TURNS):
            await asyncio.sleep(seconds if turn else 0.0)
            answer = await self._ask(url, key, messages, TOKENS)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on, say more"}]
        return 0.0

    async def _ask(self, url: str, key: str, messages: list[dict[str, str]], tokens: int) -> str:
        body = {"model": self.model, "messages": messages, "max_tokens": tokens, "temperature": 1.0}
        reply = await self.client.post(f"{url}/chat/completions", json=body, headers={"authorization": f"Bearer {key}"})
        reply.raise_for_status()
        self.requests += 1
        return str(reply.json()["choices"][0]["message"]["content"])


async def session_vs_engine(side: Side, agents: Agents, there: Replica, rounds: int) -> float:
    """Every request is a conversation of its own on both sides, so both encode and sample the same."""
    url, ratios = f"http://{there.lease.http_address}/v1", []
    agents.model = (await agents.client.get(f"{url}/models")).json()["data"][0]["id"]  # a session takes any
    agents.plays = False
    agents.hold.set()
    for number in range(rounds + 1):
        rates = []
        sides: tuple[Callable[[], list[Awaitable[Any]]], ...] = (
            lambda: [side.play(place) for place in range(GROUPS)],
            lambda: [agents.talk(url, "none") for _ in range(GROUP * GROUPS)],
        )
        for work in sides:
            before = agents.requests
            seconds, _ = await timed(asyncio.gather(*work()))
            rates.append((agents.requests - before) / seconds)
        print(f"sessions {rates[0]:8.1f} requests/s   vLLM's own server {rates[1]:8.1f} requests/s", flush=True)
        ratios += [rates[0] / rates[1]] if number else []
    return statistics.median(ratios)


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
            while agents.held < sessions:  # noqa: ASYNC110 (they come over HTTP)
                await asyncio.sleep(0.05)
            peaks.append(process.memory_info().rss)
            agents.hold.set()
            await asyncio.gather(*(call.read() for call in calls))
            print(f"{sessions} sessions: {peaks[-1] / 2**20:.1f} MiB", flush=True)
    return (peaks[-1] - peaks[1]) / 2**20, (peaks[0] - idle) / sessions / 1024


async def prefill(engine: Any) -> tuple[float, float]:
    """Tokens computed before sampling over new ones, of episodes whose turns continue the exact tokens; and the least that blocks allow."""
    from vllm import SamplingParams

    async def cached(context: list[int], number: int, turn: int) -> tuple[int, list[int]]:
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
        outputs = [out async for out in engine.llm.generate({"prompt_token_ids": context}, params, f"{number}.{turn}")]
        return outputs[-1].num_cached_tokens or 0, list(outputs[-1].outputs[0].token_ids)

    async def episode(number: int) -> tuple[int, int, int]:
        context, computed, new, least, seen = [4 + number % 40] * 48, 0, 0, 0, 0
        for turn in range(TURNS):
            known, answer = await cached(context, number, turn)
            computed += len(context) - known
            new += len(context) - seen
            least += len(context) - max(0, seen - 1) // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS
            context = [*context, *answer]
            seen, context = len(context), [*context, *((number * 7 + turn * 3 + k * k) % 40 + 4 for k in range(MESSAGE))]
        return computed, new, least

    await engine.open()
    found = await asyncio.gather(*(episode(number) for number in range(GROUP)))
    computed, new, least = (sum(each) for each in zip(*found, strict=True))
    return computed / new, least / new


def prefill_alone(folder: Path, model: Path) -> dict[str, float]:
    """`prefill` on an engine of its own, which ends before the replica starts."""
    config = configured(folder, model, {"file": str(folder / "talk.py")})
    rollout = config.rollout.model_copy(update={"max_model_len": 2048})
    engine = start(config.model_copy(update={"rollout": rollout}), with_tokenizer(model, folder / "files"))
    try:
        ratio, floor = asyncio.run(prefill(engine))
    finally:
        engine.close()
    return {"prefill_vs_new": ratio, "prefill_floor": floor}


async def measure(options: argparse.Namespace, folder: Path, model: Path) -> dict[str, float]:
    (folder / "talk.py").write_text(TALK % TURNS)
    measured: dict[str, float] = {}
    async with AsyncExitStack() as stack:
        server = stack.enter_context(EmbeddedServer.start(folder / "redis"))
        config = configured(folder, model, {"file": str(folder / "talk.py"), "max_turns": TURNS})
        there = await stack.enter_async_context(replica(server.url, RUN_ID, model, folder / "replica.log", config))
        log = ExperienceLog(there.run)
        term = await log.take(Writer.LEARNER)
        await log.begin(0)
        learner = Learner.of(RUN_ID, model, term.counter)
        stack.callback(learner.arena.close)
        await learner.push(there.weights, 0, hf_weights(model))
        await log.ack_stage(there.lease.id, 0, term.counter)
        await log.ack_commit(there.lease.id, 0, term.counter, 0.0, 0.0)
        await there.run.set_state(RunState.RUNNING)
        pool = ReplicaPool(there.run, log, 600.0, SEQS)
        stack.push_async_callback(pool.close)
        await pool.refresh()
        agents = Agents()
        stack.push_async_callback(agents.client.aclose)
        routes = Starlette(routes=[Route("/run", agents.run, methods=["POST"])])
        port = await stack.enter_async_context(serve_http("127.0.0.1", 0, routes))
        spoken = configured(folder, model, {"url": f"http://127.0.0.1:{port}/run", "max_turns": REQUESTS})
        second = await Run.create(there.run.redis, "agents", spoken, model_files(model))
        await stack.enter_async_context(environment_process(server.url, there.run, folder / "talk.log"))
        child, lease = await stack.enter_async_context(environment_process(server.url, second, folder / "agents.log"))
        side = await side_of(stack, there.run, config, model, pool)
        talking = await side_of(stack, second, spoken, model, pool)
        if "tokens" in options.parts:
            measured["tokens_vs_single_turn"] = await tokens_vs_single_turn(side, options.rounds)
        if "tools" in options.parts:
            agents.hold.set()
            quick = await rate_in_flight(talking, there, 0, IN_FLIGHT)
            slow = await rate_in_flight(talking, there, GROUPS, IN_FLIGHT_SLOW)
            print(f"no tools {quick:8.0f} tokens/s   tools of {TOOL_SECONDS:g} s {slow:8.0f} tokens/s", flush=True)
            measured["busy_with_slow_tools"] = slow / quick
        if "requests" in options.parts:
            measured["session_vs_engine"] = await session_vs_engine(talking, agents, there, options.rounds)
        if "sessions" in options.parts:
            growth, each = await session_growth(child, lease, agents, options.sessions, options.rounds)
            measured |= {"session_growth_mib": growth, "session_kib": each}
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=2000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = demo_model(folder / "model", 2048, len(vocabulary()))
        found = prefill_alone(folder, model) if "prefill" in options.parts else {}
        if set(options.parts) - {"prefill"}:
            found |= asyncio.run(measure(options, folder, model))
    measured = {key: round(value, 3) for key, value in found.items()}
    met = all(found[key] >= least for key, least in LEAST.items() if key in found)
    met &= all(found[key] <= most for key, most in MOST.items() if key in found)
    print(json.dumps({"bench": "episodes", "measured": measured, "target": LEAST | MOST, "met": met}))
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
