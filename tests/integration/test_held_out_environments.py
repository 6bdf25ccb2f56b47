"""Held-out sets with environments of their own: one server hosts all environments of a run."""

import asyncio
import json

import grpc
import httpx
import pytest

from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc
from polyreme.net import rpc
from polyreme_environment.server import hosted_by, serve_all
from polyreme_reward.server import serve as serve_rewards
from polyreme_rollout.testing.simulated_engine import Lengths
from polyreme_trainer.orchestrator.main import orchestrate
from support.environment_stream import Stream
from support.episode_world import episode_world
from support.product import KEY, Product
from support.tiny_tokenizer import CHAT_TEMPLATE

SHOWS_TOOLS = "{{ tools | map(attribute='function.name') | list if tools else '' }}" + CHAT_TEMPLATE
COUNT = """
class Count:
    def __init__(self, turns=3):
        self.turns, self.seen = turns, 0
    def reset(self, row, seed):
        self.seed = seed
    def step(self, message):
        self.seen += 1
        return "more", float(self.seen == self.turns and self.seed % 2), self.seen == self.turns
"""
AGENT = """
import json, urllib.request

def ask(base_url, api_key, messages):
    body = json.dumps({"model": "m", "messages": messages}).encode()
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)))

def run(task, base_url, api_key, turns=1):
    for turn in range(turns):
        ask(base_url, api_key, [{"role": "user", "content": f"turn {turn}"}])
    return turns / 10
"""


@pytest.fixture
def world(redis, run_id, tmp_path):
    (tmp_path / "count.py").write_text(COUNT)
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}+1=", "answer": "?"}) for n in range(4)))

    def opened(sets, **sections):
        sets = [{"data": str(tmp_path / "eval.jsonl"), **each} for each in sets]
        engine = {"lengths": Lengths(8)}
        return episode_world(redis, run_id, tmp_path, engine, chat_template=SHOWS_TOOLS, eval_sets=sets, **sections)

    return opened


async def trained(w):
    """Trains to the end. Returns the first evaluation, and the lines of its answers by set."""
    await asyncio.wait_for(asyncio.gather(orchestrate(w.run), w.learner.train([1, 2], w.replicas)), 300)
    assert (await w.log.audit()).clean and sorted(w.learner.trained) == [1, 2]
    record = next(record for _, record in await w.run.records("0", 0) if record["kind"] == "eval")
    lines = {}
    for line in (w.config.run_dir / "samples" / "evaluation_0000.jsonl").read_text().splitlines():
        answer = json.loads(line)
        lines.setdefault(answer.get("set", ""), []).append(answer)
    return record, lines


async def test_a_run_of_single_turns_evaluates_in_environments(world, tmp_path):
    """A set is scored by its environment, or by the section `reward`."""
    played = {"file": str(tmp_path / "count.py"), "options": {"turns": 2}}
    sets = [
        {"name": "plain"},
        {"name": "games", "answers": 2, "environment": {**played, "correctness": True}},
        {"name": "judged", "environment": played, "scored_by": "reward"},
        {"name": "sums", "environment": {"tools": ["calculator"]}},
    ]
    async with world(sets, eval_best="games/pass@2") as w, serve_rewards(w.config.reward, run=w.run):
        async with serve_all(hosted_by(w.config), run=w.run) as lease:
            assert lease.facts["episodes"] == {"games": 256, "judged": 256, "sums": 256}
            record, lines = await trained(w)
        groups = [group for groups in w.learner.trained.values() for group in groups]
        assert not any(group.episodes for group in groups), "training has no environment"
    assert {name: len(answers) for name, answers in lines.items()} == {"plain": 4, "games": 8, "judged": 4, "sums": 4}
    assert not any("turns" in answer for answer in lines["plain"])
    assert all(len(answer["turns"]) == 2 for answer in lines["games"] + lines["judged"])
    assert {answer["score"] for answer in lines["games"]} == {0.0, 1.0}, "each episode has its seed"
    solved = [any(answer["score"] for answer in lines["games"] if answer["row"] == row) for row in range(4, 8)]
    assert record["result"] == {"metric": "games/pass@2", "value": sum(solved) / 4}
    assert record["games/accuracy"] == record["games/reward/environment"] == sum(a["score"] for a in lines["games"]) / 8
    parts = {name: set(answers[0]["parts"]) for name, answers in lines.items()}
    both = {"exact", "environment"}
    assert parts == {"plain": {"exact"}, "games": {"environment"}, "judged": both, "sums": both}


async def test_agents_of_one_server_have_one_session_address(world, tmp_path):
    agent = {"file": str(tmp_path / "agent.py"), "function": "run"}
    sets = [{"name": "long", "environment": {**agent, "options": {"turns": 3}, "episodes": 2}}, {"name": "same"}]
    async with world(sets, environment=agent, reward=None) as w, serve_all(hosted_by(w.config), run=w.run) as lease:
        assert lease.facts["episodes"] == {"": 256, "long": 2}
        record, lines = await trained(w)
        groups = [group for groups in w.learner.trained.values() for group in groups]
        assert {sample.score for group in groups for sample in group.samples} == {0.1}
    assert [answer["score"] for answer in lines["long"]] == [0.3] * 4
    assert [answer["score"] for answer in lines["same"]] == [0.1] * 4
    assert record["long/reward/environment"] == pytest.approx(0.3)


async def test_a_run_of_a_product_evaluates_in_environments(world, tmp_path, monkeypatch):
    """The product's sessions and those of a held-out set's agents have one address. Nothing of an evaluation is trained on."""
    monkeypatch.setenv("POLYREME_ONLINE_KEY", KEY)
    played = {"file": str(tmp_path / "count.py"), "options": {"turns": 2}}
    agent = {"file": str(tmp_path / "agent.py"), "function": "run", "options": {"turns": 3}}
    sets = [{"name": "games", "environment": played}, {"name": "agents", "environment": agent}]
    product = {"environment": {"online": {}, "episodes": 8}, "reward": None, "group_size": 2, "groups_per_iteration": 1}
    async with (
        world(sets, max_staleness=1, **product) as w,
        serve_all(hosted_by(w.config), run=w.run, group_size=2) as lease,
        httpx.AsyncClient(timeout=60.0) as http,
    ):
        assert lease.facts["episodes"] == {"": 8, "games": 256, "agents": 256}
        using = asyncio.create_task(use(Product(lease.http_address, http)))
        record, lines = await trained(w)
        using.cancel()
        await asyncio.gather(using, return_exceptions=True)
        groups = [group for groups in w.learner.trained.values() for group in groups]
    assert len(groups) == 2 and {sample.score for group in groups for sample in group.samples} == {7.0}
    assert {name: len(answers) for name, answers in lines.items()} == {"games": 4, "agents": 4}
    assert all(len(answer["turns"]) == 2 for answer in lines["games"])
    assert [answer["score"] for answer in lines["agents"]] == [0.3] * 4
    assert record["agents/reward/environment"] == pytest.approx(0.3)


async def use(product):
    """A product whose users never stop."""
    while True:
        await product.played("a task", 7.0)


async def test_an_episode_names_its_environment(world, tmp_path):
    played = {"file": str(tmp_path / "count.py")}
    sets = [{"name": "short", "environment": {**played, "options": {"turns": 1}}}]
    async with (
        world(sets, environment=played, reward=None) as w,
        serve_all(hosted_by(w.config)) as lease,
        rpc.connect(lease.address, None) as channel,
    ):
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        for name, kind in (("", pb.Ask), ("short", pb.Ending)):
            episode = Stream(stub)
            await episode.send(start=pb.Start(row_json="{}", environment=name))
            assert isinstance(await episode.answer("1"), kind)
        assert await Stream(stub).send(start=pb.Start(environment="other")) is grpc.StatusCode.INVALID_ARGUMENT
