"""Agents that ask for turns at a session address: real worker processes and HTTP, and the orchestrator's sessions over simulated replicas."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
import yaml

from polyreme.api.v1 import experience_pb2
from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError
from polyreme_environment.server import serve
from polyreme_rollout.testing.simulated_engine import Failures, Lengths
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.environment.environment_client import EnvironmentClient
from polyreme_trainer.orchestrator.environment.episodes import HostLostError
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError
from polyreme_trainer.orchestrator.generation.generate import GenerateError
from polyreme_trainer.orchestrator.main import orchestrate
from support import guide
from support.episode_world import WIDE, episode_world
from support.tiny_tokenizer import CHAT_TEMPLATE, model_files
from support.waiting import until

AGENT = '''
import json, time, urllib.error, urllib.request

def run(task, base_url, api_key, act="talk"):
    """Talks over three turns."""
    def post(path, body, read=None):
        headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
        request = urllib.request.Request((base_url + path).replace("/v1/..", ""), json.dumps(body).encode(), headers)
        if read is not None:
            return read(urllib.request.urlopen(request, timeout=60))
        with urllib.request.urlopen(request, timeout=60) as reply:
            return json.load(reply)

    def chat(messages, **more):
        answer = post("/chat/completions", {"model": "any", "messages": messages, **more})
        return [*messages, answer["choices"][0]["message"]]

    return globals()["do_" + act](task, post, chat)

def do_talk(task, post, chat):
    messages = [{"role": "user", "content": task["prompt"]}]
    for number in range(3):
        messages = [*chat(messages), {"role": "user", "content": f"turn {number}"}]
    return {"reward": 2, "metrics": {"messages": len(messages)}}

def do_post(task, post, chat):
    messages = chat([{"role": "user", "content": "a"}])
    post("/reward", {"reward": 0.5})
    chat([*messages, {"role": "user", "content": "b"}])
    post("/reward", {"reward": 0.25})
    post("/reward", {"reward": 0.25})

def do_rewrite(task, post, chat):
    first = chat([{"role": "user", "content": "a"}])
    chat([*first, {"role": "user", "content": "b"}])
    chat([*first, {"role": "user", "content": "c"}])
    chat([{"role": "user", "content": "summary"}])
    return 1.0

def do_parallel(task, post, chat):
    """Three sub-agents of three turns, and a summary."""
    from concurrent.futures import ThreadPoolExecutor

    first = chat([{"role": "user", "content": "a"}])

    def sub(name):
        messages = [*first, {"role": "user", "content": name}] if name == "b" else [{"role": "user", "content": name}]
        for _ in range(3):
            messages = [*chat(messages), {"role": "user", "content": "on"}]
        return messages[-2]["content"]

    with ThreadPoolExecutor() as threads:
        told = list(threads.map(sub, "bcd"))
    chat([*first, {"role": "user", "content": "e"}, *({"role": "user", "content": text} for text in told)])
    return 1.0

def do_stream(task, post, chat):
    """As `do_talk`, streamed."""
    messages = [{"role": "user", "content": task["prompt"]}]
    for number in range(3):
        chunks = list(events(post, messages))
        said = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        messages = [*messages, {"role": "assistant", "content": "".join(said)}, {"role": "user", "content": f"turn {number}"}]
    return {"reward": 2, "metrics": {"messages": len(messages)}}

def do_leave(task, post, chat):
    """Closes its first stream, at the first piece of text, and asks again for something else."""
    for chunk in (stream := events(post, [{"role": "user", "content": "a"}])):
        if chunk["choices"][0]["delta"].get("content"):
            break
    stream.close()
    chat([{"role": "user", "content": "b"}], max_tokens=4)
    return 1.0

def events(post, messages):
    with post("/chat/completions", {"model": "any", "messages": messages, "stream": True}, read=lambda reply: reply) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))

def do_forget(task, post, chat):
    chat([{"role": "user", "content": "a"}])

def do_raise(task, post, chat):
    chat([{"role": "user", "content": "a"}])
    raise ValueError("no good")

def do_silence(task, post, chat):
    return 1.0

def do_exit(task, post, chat):
    import os
    os._exit(3)

def do_hang(task, post, chat):
    chat([{"role": "user", "content": "a"}])
    time.sleep(1000)

def do_endless(task, post, chat):
    messages, refused = [{"role": "user", "content": "a"}], []
    while len(refused) < 50:
        try:
            messages = [*chat(messages), {"role": "user", "content": "b"}]
        except urllib.error.HTTPError as error:
            refused.append(json.load(error)["error"]["code"])
    return {"reward": 1.0, "metrics": {"over": refused.count("episode_over")}}

def do_tools(task, post, chat):
    tools = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object", "properties": {}}}}]
    messages = chat([{"role": "user", "content": "a"}], tools=tools)
    chat([*messages, {"role": "tool", "tool_call_id": "c", "content": "408"}], tools=tools)
    return 1.0

def do_text(task, post, chat):
    """Writes the end token of an answer behind it, where `do_text_without` goes on without."""
    return write(post, "<eos>")

def do_text_without(task, post, chat):
    return write(post, "")

def write(post, end):
    prompt, ended = "a", 0
    for number in range(4):
        choice = post("/completions", {"prompt": prompt, "max_tokens": 4})["choices"][0]
        is_over = choice["finish_reason"] == "stop"
        prompt, ended = prompt + choice["text"] + (end if is_over else "") + "b", ended + (is_over and number < 3)
    return {"reward": 1, "metrics": {"ended": ended}}

def do_ids(task, post, chat):
    ids = [8, 9]
    for number in range(3):
        choice = post("/completions", {"prompt": ids, "max_tokens": 4, "return_token_ids": True})["choices"][0]
        assert choice["prompt_token_ids"] == ids
        before, ids = ids, ids + choice["token_ids"] + [10]
    post("/completions", {"prompt": before[:-1] + [11]})
    post("/completions", {"prompt": [12]})
    return 1.0

def do_inference(task, post, chat):
    """Tokens in, tokens out; its answers also end with a token of its own."""
    ids = [8, 9]
    for number in range(3):
        body = {"token_ids": ids, "sampling_params": {"max_tokens": 16, "stop_token_ids": list(range(10, 20))}}
        (choice,) = post("/../inference/v1/generate", body)["choices"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        ids = ids + choice["token_ids"] + [10]
    return 1.0

def do_stop(task, post, chat):
    messages, stops = [{"role": "user", "content": "a"}], list("aeiou02468")
    for number in range(3):
        messages = [*chat(messages, stop=stops), {"role": "user", "content": "b"}]
        assert not set(stops) & set(messages[-2]["content"])
    return 1.0

def do_unknown_token(task, post, chat):
    post("/completions", {"prompt": [10_000]})

def do_hot(task, post, chat):
    chat([{"role": "user", "content": "a"}], temperature=0.0)
'''
SHORT = {"lengths": Lengths(8)}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    return EnvironmentConfig(file=path, function="run", step_timeout=60.0, start_timeout=60.0, worker_memory_mib=2048)


@asynccontextmanager
async def hosted(redis, run_id, folder, config, *engines, **sections):
    """A run with an environment server for agents."""
    section = config.model_dump(mode="json", exclude_defaults=True)
    async with episode_world(redis, run_id, folder, *(engines or [SHORT]), reward=None, environment=section, **sections) as w:
        client = EnvironmentClient(w.run, config, w.config.data, w.config.seed)
        async with serve(config, run=w.run, grace=0.0):
            await client.refresh()
            try:
                yield w, client
            finally:
                await client.close()


def acting(config, act, **settings):
    return config.model_copy(update={"options": {"act": act}, **settings})


async def test_an_episode_of_an_agent(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, config) as (w, client):
        group = await w.play(client)
        assert [len(sample.turns) for sample in group.samples] == [3, 3, 3]
        assert [sample.score for sample in group.samples] == [2.0] * 3
        assert [part[:2] for part in group.samples[0].parts] == [("environment", 2.0), ("environment/messages", 7.0)]
        for sample, episode in zip(group.samples, group.episodes, strict=True):
            shown = json.loads(episode.messages)
            texts = [message["content"] for message in shown if message["role"] == "assistant"]
            ids = [sample.token_ids[turn.start : turn.end].tolist() for turn in sample.turns]
            assert w.template.decode(ids, special=False) == texts
            (between,) = w.template.decode([sample.token_ids[sample.turns[0].end : sample.turns[1].start].tolist()], special=True)
            assert between.endswith("<user>turn 0<assistant>")
            assert [turn.reward for turn in sample.turns] == [0.0, 0.0, 2.0] and episode.seconds > 0


async def test_rewards_may_be_posted_for_each_turn(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, acting(config, "post")) as (w, client):
        group = await w.play(client)
        assert [[turn.reward for turn in sample.turns] for sample in group.samples] == [[0.5, 0.5]] * 3


async def test_an_agent_that_rewrites_its_history_has_several_trajectories(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, acting(config, "rewrite")) as (w, client):
        group = await w.play(client)
        assert [len(sample.turns) for sample in group.samples] == [2, 1, 1] * 3
        assert group.episode_of == [0, 0, 0, 1, 1, 1, 2, 2, 2] and {sample.score for sample in group.samples} == {1.0}


async def test_sub_agents_ask_at_the_same_time(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, acting(config, "parallel", parallel_turns=2, max_turns=16)) as (w, client):
        group = await w.play(client, bounds=WIDE.__class__(16, 128, 3600.0))
        for number in range(3):
            samples = [sample for sample, of in zip(group.samples, group.episode_of, strict=True) if of == number]
            assert sorted(len(sample.turns) for sample in samples) == [1, 3, 3, 4]
            assert [turn.reward for sample in samples for turn in sample.turns if turn.reward] == [1.0]
            assert samples[-1].turns[-1].reward == 1.0, "the summary is the newest turn"
            begins = [w.template.decode([group.prompt_of(sample).tolist()], special=True)[0] for sample in samples]
            assert begins[0] == "<user>a<assistant>" and {"<user>c<assistant>", "<user>d<assistant>"} < set(begins)


def recorded(group):
    """What of a group depends on no time, and on no replica."""
    return [
        (each.token_ids.tolist(), each.logprobs.tolist(), each.loss_mask.tolist(), each.spans, each.score, each.parts, each.text)
        for each in group.samples
    ], [(each.outcome, each.messages) for each in group.episodes]


async def test_a_stream_is_recorded_as_any_other_reply(redis, run_id, tmp_path, config):
    found = []
    for act in ("talk", "stream"):
        sections = {"rollout": {"max_new_tokens": 24}}
        async with hosted(redis, f"{run_id}-{act}", tmp_path, acting(config, act), {"lengths": Lengths(40)}, **sections) as (
            w,
            client,
        ):
            found.append(recorded(group := await w.play(client)))
    assert found[0] == found[1]
    assert max(turn.end - turn.start for sample in group.samples for turn in sample.turns) > 16, "more than one piece"


async def test_a_stream_goes_on_when_its_replica_dies(redis, run_id, tmp_path, config):
    long, rollout = {"lengths": Lengths(40)}, {"max_new_tokens": 24}
    mortal = {**long, "failures": Failures(die_after=60)}
    async with hosted(redis, run_id, tmp_path, acting(config, "stream"), mortal, long, rollout=rollout) as (w, client):
        group = await w.play(client)
        assert w.replicas[0].engine.dead and any(len(sample.replicas) > 1 for sample in group.samples)
        assert [len(sample.turns) for sample in group.samples] == [3, 3, 3], "the client has repeated what it was told"


async def test_a_stream_goes_on_over_a_swap(redis, run_id, tmp_path, config):
    slow = {"lengths": Lengths(1e9), "step_seconds": 0.01}
    async with hosted(redis, run_id, tmp_path, acting(config, "stream"), slow, rollout={"max_new_tokens": 32}) as (w, client):
        playing = asyncio.create_task(w.play(client))
        await until(lambda: w.replicas[0].engine.tokens >= 20)
        await w.learner.write(1)
        await w.learner.push(w.replicas[0])
        group = await playing
        assert {version for sample in group.samples for version, _, _ in sample.spans} == {0, 1}
        assert [len(sample.turns) for sample in group.samples] == [3, 3, 3]


async def test_a_stream_that_is_closed_ends_its_turn(redis, run_id, tmp_path, config):
    endless = {"lengths": Lengths(1e9), "step_seconds": 0.1}
    async with hosted(redis, run_id, tmp_path, acting(config, "leave"), endless) as (w, client):
        group = await asyncio.wait_for(w.play(client), 60)
        for sample, episode in zip(group.samples, group.episodes, strict=True):
            assert len(sample.turns) == 1 and len(sample) == 4, "the tokens of the withdrawn turn are no part of it"
            asked, cut, again, answer = json.loads(episode.messages)
            assert (asked["content"], again["content"], answer["turn"]) == ("a", "b", 0)
            assert asked["withdrawn"] and cut["withdrawn"] and "turn" not in cut
            assert 0 < len(cut["content"]) < w.config.rollout.max_new_tokens, "each token is a character"


@pytest.mark.parametrize(("act", "branches"), [("text", False), ("text_without", True)])
async def test_a_text_continues_exactly(redis, run_id, tmp_path, config, act, branches):
    async with hosted(redis, run_id, tmp_path, acting(config, act)) as (w, client):
        group = await w.play(client)
        for number in range(3):
            samples = [sample for sample, of in zip(group.samples, group.episode_of, strict=True) if of == number]
            (ended,) = [part.raw for part in samples[0].parts if part.name == "environment/ended"]
            assert len(samples) == 1 + (ended if branches else 0) and sum(len(sample.turns) for sample in samples) == 4
            for sample in samples:
                text = w.template.decode([[*sample.prompt_ids, *sample.token_ids]], special=True)[0]
                assert text.startswith("a") and text.count("<eos>") == sum(
                    sample.token_ids[turn.end - 1] == w.template.end_id for turn in sample.turns
                )
                assert all(
                    w.template.decode([[sample.token_ids[turn.end]]], special=True) == ["b"] or not branches
                    for turn in sample.turns[:-1]
                )
        assert branches <= (len(group.samples) > 3), "an answer has ended before its bound"


async def test_tokens_continue_the_turn_that_they_repeat(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, acting(config, "ids")) as (w, client):
        group = await w.play(client)
        assert [len(sample.turns) for sample in group.samples] == [3, 1, 1] * 3
        first, branch, other = group.samples[:3]
        assert first.prompt_ids.tolist() == [8, 9] and other.prompt_ids.tolist() == [12]
        assert branch.prompt_ids.tolist() == [8, 9, *first.token_ids[: first.turns[1].end].tolist(), 11]


async def test_tokens_of_the_inference_api_end_at_its_stops(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, acting(config, "inference"), {"lengths": Lengths(1e9)}) as (w, client):
        group = await w.play(client)
        for sample in group.samples:
            assert len(sample.turns) == 3 and sample.prompt_ids.tolist() == [8, 9]
            for turn in sample.turns:
                *others, last = sample.token_ids[turn.start : turn.end].tolist()
                assert not set(range(10, 20)) & set(others) and (last in range(10, 20) or len(others) == 15)


async def test_a_stop_text_ends_a_turn_with_its_token(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, acting(config, "stop")) as (w, client):
        group = await w.play(client)
        assert [len(sample.turns) for sample in group.samples] == [3] * 3
        stopped = 0
        for sample in group.samples:
            for turn in sample.turns:
                *text, last = w.template.token_texts(sample.token_ids[turn.start : turn.end].tolist())
                assert not set("aeiou02468") & set(text) and last in {*"aeiou02468", "<eos>"}
                stopped += last != "<eos>"
            assert sample.finish_reason == experience_pb2.FINISH_REASON_STOP
        assert stopped


async def test_tools_are_declared_to_the_policy(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, acting(config, "tools")) as (w, client):
        with pytest.raises(EpisodeError, match="HTTP Error 400"):
            await w.play(client)
        w.template = Template(model_files("{{ tools | map(attribute='function.name') | list }}" + CHAT_TEMPLATE), w.config.data)
        group = await w.play(client)
        for sample in group.samples:
            assert "multiply" in w.template.decode([sample.prompt_ids.tolist()], special=True)[0]
            (between,) = w.template.decode([sample.token_ids[sample.turns[0].end : sample.turns[1].start].tolist()], special=True)
            assert between.endswith("<assistant>") and "<unk>408" in between and "multiply" not in between


@pytest.mark.parametrize(
    ("act", "error"),
    [
        ("forget", "expected a reward, which the agent returns"),
        ("raise", "ValueError: no good"),
        ("silence", "expected at least one turn"),
        ("hot", "HTTP Error 400"),
        ("unknown_token", "HTTP Error 400"),
    ],
)
async def test_a_failed_agent_is_no_reward(redis, run_id, tmp_path, config, act, error):
    async with hosted(redis, run_id, tmp_path, acting(config, act)) as (w, client):
        with pytest.raises(EpisodeError, match=error):
            await w.play(client)


async def test_a_turn_that_no_replica_takes_fails_the_attempt(redis, run_id, tmp_path, config):
    beyond = {"max_new_tokens": 300, "max_model_len": 512}  # the replica's engine has 256
    async with hosted(redis, run_id, tmp_path, config, rollout=beyond) as (w, client):
        with pytest.raises(GenerateError, match="max_model_len"):
            await w.play(client, bounds=WIDE.__class__(8, 512, 3600.0))


async def test_a_process_that_ends_costs_its_episodes_a_try(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, acting(config, "exit")) as (w, client):
        with pytest.raises((HostLostError, EpisodeError), match="exited with status 3"):
            await w.play(client, tries=1)


async def test_a_turn_that_is_lost_with_its_server_leaves_nothing(redis, run_id, tmp_path, config):
    section, bounds = config.model_dump(mode="json", exclude_defaults=True), WIDE.__class__(3, 128, 3600.0)
    async with episode_world(redis, run_id, tmp_path, SHORT, reward=None, environment=section) as w:
        client, task = EnvironmentClient(w.run, config, w.config.data, w.config.seed), await w.admit()
        try:
            async with serve(config, run=w.run, grace=0.0):
                await client.refresh()
                w.replicas[0].engine.step_seconds = 3600.0
                playing = asyncio.create_task(w.play(client, task, bounds))
                await w.replicas[0].asked.wait()
            w.replicas[0].engine.step_seconds = 0.0
            async with serve(config, run=w.run, grace=0.0):
                await client.refresh()
                assert recorded(await playing) == recorded(await w.play(client, task, bounds))
        finally:
            await client.close()


async def test_an_agent_that_hangs_is_killed_and_others_play_on(redis, run_id, tmp_path, config):
    hasty = acting(config, "hang", max_seconds=1.0, step_timeout=0.5)
    async with hosted(redis, run_id, tmp_path, hasty) as (w, client):
        with pytest.raises(EpisodeError, match=r"it went on for 0\.5 s after a bound"):
            await w.play(client, bounds=WIDE.__class__(8, 128, 1.0))


async def test_an_agent_still_gives_its_reward_after_a_bound(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, acting(config, "endless")) as (w, client):
        group = await w.play(client, bounds=WIDE.__class__(2, 128, 3600.0))
        assert {episode.outcome for episode in group.episodes} == {experience_pb2.OUTCOME_TURNS}
        assert [len(sample.turns) for sample in group.samples] == [2, 2, 2] and group.mean_reward == 1.0
        assert dict((part.name, part.raw) for part in group.samples[0].parts)["environment/over"] == 50


async def test_the_agent_of_the_guide(redis, run_id, tmp_path):
    guide.write_files("agents.md", tmp_path)
    section = yaml.safe_load((tmp_path / "agent.yaml").read_text())["environment"]
    assert section == {"file": "agent.py", "function": "run", "max_turns": 3}
    config = EnvironmentConfig.model_validate({**section, "file": tmp_path / "agent.py", "start_timeout": 120.0})
    async with hosted(redis, run_id, tmp_path, config) as (w, client):
        group = await w.play(client)
        assert [len(sample.turns) for sample in group.samples] == [3, 3, 3] and group.mean_reward == 0.0
        assert EnvironmentConfig.model_validate(yaml.safe_load((tmp_path / "url.yaml").read_text())["environment"]).is_agent


async def test_a_run_with_an_agent(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, config) as (w, _):
        await asyncio.gather(orchestrate(w.run), w.learner.train([1, 2], w.replicas))
        assert (await w.log.audit()).clean and sorted(w.learner.trained) == [1, 2]


@pytest.mark.parametrize("code", ["x = 1", "def run(task): ...", "1 / 0"])
async def test_a_function_that_cannot_be_loaded_is_a_config_error(config, code):
    config.file.write_text(code)
    with pytest.raises(ConfigError):
        async with serve(config):
            pass
