"""Whole runs with an environment, over simulated replicas: scores of the reward service, a teacher, a token budget, staleness, dropped groups."""

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest

from polyreme.config.environment import EnvironmentConfig
from polyreme_environment.server import serve
from polyreme_rollout.testing.simulated_engine import Lengths
from polyreme_trainer.orchestrator.environment.episodes import Ending
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.token_budget import TokenBudget
from polyreme_trainer.orchestrator.main import orchestrate
from support.episode_world import episode_world
from support.raw_http import raw_server, reply
from support.rewards import serving
from support.tiny_tokenizer import model_files

SHORT = {"lengths": Lengths(8)}
COUNT = """
class Count:
    def reset(self, row, seed):
        self.seen = 0
    def step(self, message):
        self.seen += 1
        return f"turn {self.seen}", 0.25, self.seen == 3
"""
SILENT = """
import json, urllib.request

def run(task, base_url, api_key):
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    for text in ("one", "two"):
        body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
        urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body, headers), timeout=60).read()
"""
REWARD = """
def reward(messages, response, templated_prompt, metadata, label):
    assert messages[-1] == {"role": "assistant", "content": response} and templated_prompt.endswith("<assistant>")
    return {"score": len(messages), "length": len(response)}
"""
PER_TOKEN = """
def reward(token_ids):
    return [0.5] * len(token_ids)
"""


@asynccontextmanager
async def run_of(redis, run_id, folder, code=COUNT, reward="", agent=False, engine=SHORT, **sections):
    """A run with an environment server, and with a reward service if `reward` is its code."""
    (folder / "played.py").write_text(code)
    played = {"file": str(folder / "played.py"), "start_timeout": 60.0, **({"function": "run"} if agent else {})}
    rewards = [{"file": str(folder / "judging.py")}] if reward else []
    sections = {"reward": {"rewards": rewards} if reward else None, **sections}
    environment = EnvironmentConfig.model_validate(played | sections.pop("environment", {}))
    async with episode_world(redis, run_id, folder, engine, environment=environment.model_dump(mode="json"), **sections) as w:
        if not reward:
            async with serve(environment, run=w.run):
                yield w
        else:
            (folder / "judging.py").write_text(reward)
            async with serve(environment, run=w.run, rewarded=True), serving(*rewards, run=w.run):
                yield w


async def trained(w, iterations=(1, 2)):
    await asyncio.gather(orchestrate(w.run), w.learner.train(iterations, w.replicas))
    assert (await w.log.audit()).clean
    return [group for number in iterations for group in w.learner.trained[number]]


async def test_rewards_judge_the_whole_conversation(redis, run_id, tmp_path):
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    async with run_of(redis, run_id, tmp_path, reward=REWARD, data={"eval": str(tmp_path / "eval.jsonl")}) as w:
        for group in await trained(w):
            for sample in group.samples:
                shown = json.loads(group.episodes[sample.episode].messages)
                assert sample.score == len(shown) == 6 and [turn.reward for turn in sample.turns] == [0.0] * 3
                parts = {part.name: part[1:3] for part in sample.parts}
                assert parts["judging"] == (6.0, 6.0) and parts["environment"] == (0.75, 0.0)
                assert parts["judging/length"][0] == len(shown[-1]["content"]) and len(sample.calls) == 1
        first, last = [record for _, record in await w.run.records("0", 0) if record["kind"] == "eval"]
        assert first["score"] == last["score"] == 6.0 and first["parts"]["environment"] == 0.75


async def test_rewards_per_token_are_those_of_the_last_answer(redis, run_id, tmp_path):
    async with run_of(redis, run_id, tmp_path, reward=PER_TOKEN) as w:
        for group in await trained(w):
            for sample in group.samples:
                last = sample.turns[-1]
                expected = np.zeros(len(sample), np.float32)
                expected[last.start : last.end] = 0.5
                np.testing.assert_array_equal(sample.token_rewards, expected)
                assert sample.score == pytest.approx(0.5 * (last.end - last.start))


async def test_an_agent_needs_no_reward_where_rewards_judge(redis, run_id, tmp_path):
    async with run_of(redis, run_id, tmp_path, SILENT, REWARD, agent=True) as w:
        for group in await trained(w):
            assert group.episode_of == [0, 0, 1, 1, 2, 2], "each request begins a conversation"
            assert {sample.score for sample in group.samples} == {4.0} and all(sample.calls for sample in group.samples)


async def teach(body, writer):
    """A teacher whose log-probability of each id is -id / 100."""
    listed = {"data": [{"id": "big", "max_model_len": 300}]}
    ids = json.loads(body)["prompt"] if body else []
    texts = json.loads(model_files()["tokenizer.json"])["model"]["vocab"]
    names = {number: text for text, number in texts.items()}
    rows = [{str(each): {"logprob": -each / 100, "decoded_token": names.get(each, "")}} for each in ids]
    answer = {"choices": [{"prompt_logprobs": [None, *rows[1:]]}]} if body else listed
    writer.write(reply(json.dumps(answer).encode()))


async def test_a_teacher_judges_every_trained_trajectory(redis, run_id, tmp_path):
    async with raw_server(teach) as server:
        sections = {"teacher": {"url": f"{server.url}v1"}, "algorithm": {"preset": "grpo", "teacher_coef": 0.5}}
        async with run_of(redis, run_id, tmp_path, **sections) as w:
            for group in await trained(w):
                for sample in group.samples:
                    sampled = sample.loss_mask.astype(bool)
                    expected = np.where(sampled, -sample.token_ids / 100, 0.0)
                    np.testing.assert_allclose(sample.teacher_logprobs, expected, rtol=1e-6)
                    assert sample.score == 0.75 and not sampled.all()


def per_version(sample):
    """The number of the sample's tokens by version."""
    versions = {version for version, _, _ in sample.spans}
    return {each: sum(end - start for version, start, end in sample.spans if version == each) for each in versions}


@pytest.mark.parametrize(("budget", "staleness"), [(24, 1), (16, 2)])
async def test_episodes_pause_between_turns_and_inside_them(redis, run_id, tmp_path, budget, staleness):
    """Three turns of 16 tokens. With 24 a version an episode pauses inside its second turn, with 16 between two."""
    sections = {"rollout": {"max_new_tokens": 16, "tokens_per_iteration": budget}, "max_staleness": staleness, "iterations": 5}
    bounds = {"max_turns": 3, "max_seconds": 3600.0}
    async with run_of(redis, run_id, tmp_path, engine={"lengths": Lengths(1e9)}, environment=bounds, **sections) as w:
        groups = await trained(w, (1, 2, 3, 4, 5))
        rollouts = [record for _, record in await w.run.records("0", 0) if record["kind"] == "rollout"]
    assert sum(record["rollout/paused_samples"] for record in rollouts) > 0
    samples = [sample for group in groups for sample in group.samples]
    assert all([turn.end - turn.start for turn in sample.turns] == [16] * 3 for sample in samples)
    swaps = [start for sample in samples for _, start, _ in sample.spans[1:]]
    turns = {turn.start for sample in samples for turn in sample.turns}
    assert any((start in turns) == (budget == 16) for start in swaps)
    assert all(sum(per_version(sample).values()) == 48 for sample in samples)
    beyond = sum(record["rollout/parts_beyond_budget"] for record in rollouts)
    above = [sample for sample in samples if max(per_version(sample).values()) > budget]
    assert len(above) <= beyond


async def test_the_clock_of_an_episode_stands_while_it_is_paused(redis, run_id, tmp_path):
    deadlines = []

    class Talk:
        async def play(self, task, session):
            for place in range(3):
                await session.answer([{"role": "user", "content": "more"}] if place else [])
                deadlines.append((session.number, session.clock.deadline))
            return Ending(session.outcome)

    rollout = {"max_new_tokens": 16, "tokens_per_iteration": 12}
    async with episode_world(redis, run_id, tmp_path, {"lengths": Lengths(1e9)}, rollout=rollout, max_staleness=1) as w:
        task, saving = await w.admit(), PartialRolloutLog(w.log)
        budget = TokenBudget(12, 1, 1, w.log, saving)
        await budget.update()
        granting = asyncio.create_task(budget.follow_pauses())  # the learner cannot do without this group
        await asyncio.wait_for(w.play(Talk(), task, partial_log=saving, budget=budget), 60)
        granting.cancel()
    beyond, _ = budget.take()["rollout/parts_beyond_budget"]
    assert beyond >= 3 * 3
    for number in range(3):
        seen = [deadline for each, deadline in deadlines if each == number]
        assert seen == sorted(set(seen)), "each turn's pause moves it"


async def test_stale_tokens_count_from_the_oldest_turn(redis, run_id, tmp_path):
    """The learner goes on while episodes play; an episode is as old as its first token, and none is trained too late."""
    sections = {"max_staleness": 2, "iterations": 6}
    async with run_of(redis, run_id, tmp_path, engine={"lengths": Lengths(8), "step_seconds": 0.004}, **sections) as w:
        await trained(w, range(1, 7))
        found = set()
        for iteration, groups in w.learner.trained.items():
            for group in groups:
                versions = {version for sample in group.samples for version, _, _ in sample.spans}
                assert group.oldest_version == min(versions) and 0 <= iteration - 1 - min(versions) <= 2
                found.add(iteration - 1 - min(versions))
        assert max(found) > 0, "groups of three iterations are admitted at once"


async def test_groups_of_equal_episodes_are_dropped_and_replaced(redis, run_id, tmp_path):
    code = COUNT.replace("self.seen = 0", "self.seen, self.seed = 0, seed").replace("0.25,", "float(self.seed % 2),")
    async with run_of(redis, run_id, tmp_path, code, algorithm={"preset": "dapo"}, max_staleness=0) as w:
        for group in await trained(w):
            assert len({sample.score for sample in group.samples}) > 1
        assert (
            sum(record["rollout/dropped_groups"] for _, record in await w.run.records("0", 0) if record["kind"] == "rollout") > 0
        )
