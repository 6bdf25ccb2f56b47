"""The environment service with real worker processes, and its client over simulated replicas."""

import asyncio
import json
import os
from contextlib import asynccontextmanager

import grpc
import httpx
import psutil
import pytest
import yaml

from polyreme import API_VERSION
from polyreme.api.v1 import environment_pb2 as pb
from polyreme.api.v1 import environment_pb2_grpc, experience_pb2
from polyreme.config.environment import EnvironmentConfig
from polyreme.errors import ConfigError, DataError, RunFailedError, UnavailableError
from polyreme.experience.leases import Lease, Registry
from polyreme.net import rpc
from polyreme.net.endpoint import Endpoint
from polyreme_environment.contract import Moved
from polyreme_environment.grpc_service import NAME, EnvironmentServicer
from polyreme_environment.metrics import EnvironmentMetrics
from polyreme_environment.server import serve
from polyreme_rollout.testing.simulated_engine import Lengths
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.environment import environment_client
from polyreme_trainer.orchestrator.environment.environment_client import EnvironmentClient
from polyreme_trainer.orchestrator.environment.protocol import EpisodeError
from polyreme_trainer.orchestrator.main import orchestrate
from support import guide
from support.environment_stream import Stream, serving, started
from support.episode_world import WIDE, EpisodeWorld, episode_world
from support.processes import command_line
from support.tiny_tokenizer import CHAT_TEMPLATE, model_files

ENVIRONMENT = '''
import asyncio, os, struct, time

def forged(body):
    """Writes a frame to every socket that it finds."""
    for fd in range(3, 64):
        try:
            os.write(fd, struct.pack("<I", len(body)) + body)
        except OSError:
            pass

class Count:
    """Ends after `turns` answers, or does what the row's prompt or a message says."""
    def __init__(self, turns=3):
        self.turns, self.seen = turns, 0
    def reset(self, row, seed):
        self.row, self.seed = row, seed
        return row.get("first")
    async def step(self, message):
        await asyncio.sleep(0)
        self.seen += 1
        act = getattr(self, "do_" + message.strip(), None)
        if act: act()
        if message.startswith("{") or message.startswith("["): forged(message.encode())
        done = self.seen >= self.turns
        return None if done else f"turn {self.seen}", 0.25, done, {"seen": self.seen}
    def do_hang(self): time.sleep(1000)
    def do_exit(self): os._exit(3)
    def do_raise(self): raise ValueError("no good")
    def do_print(self): print("x" * 100000)
    def do_allocate(self): bytearray(1 << 32)
'''
TOOLS = '''
class Notes:
    """Keeps notes."""
    def __init__(self):
        self.reward, self.done, self.kept = 0.0, False, []
    def reset(self, **row):
        self.word = row["answer"]
    async def keep(self, note: str) -> int:
        """Keeps a note.

        Args:
            note: its text
        """
        self.kept.append(note)
        self.reward = float(len(self.kept))
        self.done = note == self.word
        return len(self.kept)
'''
BOTH = (
    TOOLS
    + """
class Judged(Notes):
    tools = ["keep"]
    def step(self, message):
        return "go on", self.reward / 10, message == self.word
"""
)
SHORT = {"lengths": Lengths(8)}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "environment.py"
    path.write_text(ENVIRONMENT)
    return EnvironmentConfig(file=path, step_timeout=60.0, start_timeout=60.0, worker_memory_mib=512)


async def test_http_answers_to_the_name_that_it_is_advertised_by_and_to_no_other(config):
    endpoint = Endpoint(advertise="players.example")
    async with serving(config, endpoint=endpoint) as (lease, _), httpx.AsyncClient(trust_env=False) as http:
        url = f"http://127.0.0.1:{lease.http_address.rpartition(':')[2]}/health"
        found = [(await http.get(url, headers={"host": host})).status_code for host in ("players.example", "other.example")]
        assert found == [200, 421]


async def test_an_episode_and_what_the_service_says_about_it(config):
    async with serving(config) as (lease, stream):
        episode = stream()
        ask = await episode.start(first="hello")
        assert [(message.role, message.content) for message in ask.messages] == [("user", "hello")]
        ask = await episode.answer("print")
        assert [(message.role, message.content) for message in ask.messages] == [("user", "turn 1")] and ask.reward == 0.25
        assert ask.seconds > 0
        await episode.answer("a")
        ending = await episode.answer("b")
        assert (ending.reward, dict(ending.parts), ending.error) == (0.25, {"seen": 3.0}, "")
        assert await episode.read() is grpc.StatusCode.OK
        async with httpx.AsyncClient(base_url=f"http://{lease.http_address}") as client:
            assert (await client.get("/ready")).status_code == 200
            metrics = (await client.get("/metrics")).text
            assert 'polyreme_environment_ended_total{how="done"} 1.0' in metrics
        assert lease.facts["episodes"] == {"": 256} and lease.facts["versions"][""].startswith("Count-")


@pytest.mark.parametrize(
    ("act", "error"),
    [
        ("raise", "step: ValueError: no good"),
        ("hang", "within environment.step_timeout = 2 s"),
        ("exit", "exited with status 3"),
        ("allocate", "MemoryError"),
    ],
)
async def test_user_code_that_fails_is_an_error_of_its_episode_alone(config, act, error):
    hasty = config.model_copy(update={"step_timeout": 2.0 if act == "hang" else 60.0})
    async with serving(hasty) as (_, stream):
        bad, other = stream(), stream()
        await bad.start()
        await other.start()
        assert error in (await bad.answer(act)).error
        assert await bad.read() is grpc.StatusCode.OK
        kept = act in ("raise", "allocate")
        found = await other.answer("a")
        assert found.messages if kept else found is grpc.StatusCode.ABORTED
        assert (await started(stream)).reward == 0.0, "a new worker plays on"


NUMBERED = '{"number": %d, "messages": %s, "reward": %s, "done": %s, "parts": %s}'


@pytest.mark.parametrize(
    "frame",
    [
        "[" * 100_000,
        "[1]",
        '{"number": 1}',
        NUMBERED % (2, '"x"', "0", "true", "{}"),
        NUMBERED % (2, '[["user", 1]]', "0", "true", "{}"),
        NUMBERED % (2, "[]", "NaN", "true", "{}"),
        NUMBERED % (2, "[]", "1" + 400 * "0", "true", "{}"),
        NUMBERED % (2, "[]", "0", "true", '{"a": Infinity}'),
    ],
    ids=["deep", "list", "number", "messages", "content", "nan", "huge", "part"],
)
async def test_a_frame_that_an_environment_writes_is_checked(config, frame):
    one = config.model_copy(update={"workers": 1})
    async with serving(one) as (_, stream):
        episode = stream()
        await episode.start()  # the episode is number 0, its call 1, the next one 2
        assert "reply is invalid" in (await episode.answer(frame)).error
        assert (await started(stream)).reward == 0.0, "a new worker plays on"


NEEDY = """
import os

if not os.path.exists("{index}"):
    raise RuntimeError("no index")

class Plays:
    def reset(self, row): pass
    def step(self, message): os._exit(3)

def run(task, base_url, api_key): os._exit(3)
"""


@pytest.mark.parametrize("plays", [{"name": "Plays"}, {"function": "run"}], ids=["class", "agent"])
async def test_a_server_without_a_worker_is_not_just_full(tmp_path, plays):
    """Its only worker ends, and what a new one needs at import is gone."""
    (index := tmp_path / "index").touch()
    (path := tmp_path / "needy.py").write_text(NEEDY.format(index=index))
    async with serving(EnvironmentConfig(file=path, start_timeout=60.0, **plays)) as (_, stream):
        index.unlink()
        episode = stream()
        await episode.start()
        if "name" in plays:
            await episode.answer("exit")
        assert await started(stream) is grpc.StatusCode.UNAVAILABLE


async def test_a_stream_that_ends_leaves_nothing_behind(config):
    async with serving(config.model_copy(update={"episodes": 1})) as (_, stream):
        first = stream()
        await first.start()
        assert await stream().start() is grpc.StatusCode.RESOURCE_EXHAUSTED
        task = asyncio.create_task(first.answer("a"))
        await asyncio.sleep(0)
        first.call.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await started(stream)).reward == 0.0


async def test_what_is_no_start_is_refused(config):
    async with serving(config) as (_, stream):
        assert await stream().send(start=pb.Start(row_json="[1]")) is grpc.StatusCode.INVALID_ARGUMENT
        assert await stream().send(start=pb.Start(row_json="{")) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_token_is_demanded(config, monkeypatch):
    monkeypatch.setenv("EPISODES", "secret")
    secured = EnvironmentConfig.model_validate({**config.model_dump(), "security": {"token_env": "EPISODES"}})
    async with serving(secured) as (lease, stream):
        assert (await stream().start()).reward == 0.0
        async with rpc.connect(lease.address) as channel:
            assert await Stream(environment_pb2_grpc.EnvironmentServiceStub(channel)).start() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("code", "error"), [("x = 1", "Write one"), ("1 / 0", "ZeroDivisionError"), ("import os; os._exit(2)", "status 2")]
)
async def test_a_file_that_cannot_be_loaded_is_a_config_error(config, code, error):
    config.file.write_text(code)
    with pytest.raises(ConfigError, match=error):
        async with serve(config):
            pass


def called(**arguments):
    return f"<tool_call>\n{json.dumps({'name': 'keep', 'arguments': arguments})}\n</tool_call>"


def seen(message):
    """Contents with their roles, the reward, and which of the calls failed."""
    messages = [(each.role, each.content) for each in getattr(message, "messages", ())]
    return messages, message.reward, [(call.name, bool(call.error)) for call in message.calls]


async def test_tools_are_declared_called_and_answered(config):
    config.file.write_text(TOOLS)
    async with serving(config) as (_, stream):
        episode = stream()
        ask = await episode.start(answer="end")
        (tool,) = json.loads(ask.tools_json)
        assert tool["function"]["name"] == "keep" and tool["function"]["parameters"]["required"] == ["note"]
        assert seen(await episode.answer("so " + called(note="a"))) == ([("tool", "1")], 1.0, [("keep", False)])
        two = await episode.answer(called(note="b") + called(nota="c"))
        assert seen(two) == (
            [("tool", "2"), ("tool", "error: missing a required argument: 'note'")],
            1.0,
            [("keep", False), ("keep", True)],
        )
        assert two.calls[0].arguments == '{"note": "b"}' and two.calls[0].result == "2" and two.tools_json == ""
        broken = await episode.send(answer=pb.Answer(text="", raw="<tool_call>keep"))
        assert broken.messages[0].content.startswith("error: malformed call: it is no JSON") and broken.reward == 0.0
        assert seen(await episode.answer(called(note="end"))) == ([], 1.0, [("keep", False)])
        other = stream()
        await other.start(answer="end")
        assert seen(await other.answer("no call ends it")) == ([], 0.0, [])
        assert await other.read() is grpc.StatusCode.OK


async def test_an_answer_without_a_call_goes_to_step(config):
    config.file.write_text(BOTH)
    async with serving(config.model_copy(update={"name": "Judged"})) as (_, stream):
        episode = stream()
        await episode.start(answer="end")
        assert seen(await episode.answer(called(note="a"))) == ([("tool", "1")], 0.0, [("keep", False)])
        assert seen(await episode.answer("what?")) == ([("user", "go on")], 0.1, [])
        assert seen(await episode.answer("end")) == ([], 0.1, [])


async def test_a_call_in_a_thought_that_the_prompt_began_is_not_made(config):
    config.file.write_text(BOTH)
    async with serving(config.model_copy(update={"name": "Judged"})) as (_, stream):
        episode = stream()
        await episode.start(answer="end")
        thought = f"I could {called(note='a')} and"
        assert seen(await episode.send(answer=pb.Answer(text=thought, in_thought=True))) == ([("user", "go on")], 0.0, [])
        whole = f"{thought} do</think>{called(note='b')}"
        assert seen(await episode.send(answer=pb.Answer(text=whole, in_thought=True))) == (
            [("tool", "1")],
            0.0,
            [("keep", False)],
        )


class NotedPool:
    """Its episodes end with their first answers, which it notes."""

    def __init__(self):
        self.draining, self.answers = False, []

    @asynccontextmanager
    async def episode(self):
        yield self

    async def reset(self, row, seed):
        return Moved()

    async def step(self, answer):
        self.answers.append(answer)
        return Moved(done=True)


@pytest.mark.parametrize("opening", ["<assistant>", "<assistant><think>"])
async def test_an_answer_says_that_the_prompt_began_its_thought(redis, run_id, tmp_path, config, opening):
    pool, metrics = NotedPool(), EnvironmentMetrics()
    servicer = EnvironmentServicer({"": pool}, metrics, 3)
    async with (
        hosted(redis, run_id, tmp_path, config) as (w, client),
        rpc.serve("127.0.0.1", 0, servicer.add_to, [NAME]) as server,
    ):
        chat_template = CHAT_TEMPLATE.replace("prompt %}<assistant>", f"prompt %}}{opening}")
        files = {name: text.replace(b"<pad>", b"<think>") for name, text in model_files(chat_template).items()}
        world = EpisodeWorld(w.run, w.config, w.replicas, w.learner, w.pool, files)
        lease = Lease("environment", "noting", f"127.0.0.1:{server.port}", "", API_VERSION, {"episodes": {"": 3}})
        async with await Registry(w.run).register(lease):
            await client.refresh()
            await world.play(client)
    assert [answer.in_thought for answer in pool.answers] == ["<think>" in opening] * 3


async def test_tools_stand_in_the_prompt_of_the_row(redis, run_id, tmp_path, config):
    config.file.write_text(TOOLS)
    async with hosted(redis, run_id, tmp_path, config) as (w, client), serve(config, run=w.run):
        await client.refresh()
        with pytest.raises(DataError, match="a chat template that shows tools"):
            await w.play(client)
        w.template = Template(model_files("{{ tools | map(attribute='function.name') | list }}" + CHAT_TEMPLATE), w.config.data)
        group = await w.play(client)
        for sample in group.samples:
            (prompt,) = w.template.decode([sample.prompt_ids.tolist()], special=True)
            assert "keep" in prompt and prompt.endswith(f"<user>{w.prompts[0].plain}<assistant>")
            assert sample.score == 0.0 and len(sample.turns) == 1


async def test_the_environment_of_the_guide(tmp_path):
    guide.write_files("environments.md", tmp_path)
    section = yaml.safe_load((tmp_path / "environment.yaml").read_text())["environment"]
    assert section == {"file": "guess.py", "max_turns": 8}
    async with serving(EnvironmentConfig.model_validate({**section, "file": tmp_path / "guess.py"})) as (_, stream):
        episode = stream()
        assert (await episode.start(prompt="Guess!", answer="42")).messages == []
        found = [await episode.answer(text) for text in ("7", "99", "so", "42")]
        assert [ask.messages[0].content for ask in found[:3]] == ["higher", "lower", "a number, please"]
        assert [each.reward for each in found] == [0.0, 0.0, -0.1, 1.0]


async def test_the_tools_of_the_guide(tmp_path):
    guide.write_files("environments.md", tmp_path)
    async with serving(EnvironmentConfig(file=tmp_path / "desk.py")) as (_, stream):
        episode = stream()
        (tool,) = json.loads((await episode.start(prompt="Which is the capital of Peru?", answer="Lima")).tools_json)
        assert list(tool["function"]["parameters"]["properties"]) == ["words", "limit"]
        text = '<tool_call>{"name": "search", "arguments": {"words": "Peru"}}</tool_call>'
        assert (await episode.answer(text)).messages[0].content == '["capital of Peru: Lima"]'
        assert (await episode.answer("Lima")).reward == 1.0


@asynccontextmanager
async def hosted(redis, run_id, tmp_path, config, **sections):
    sections |= {"environment": config.model_dump(mode="json"), "reward": None}
    async with episode_world(redis, run_id, tmp_path, SHORT, **sections) as w:
        client = EnvironmentClient(w.run, w.config.environment, w.config.data, 0)
        try:
            yield w, client
        finally:
            await client.close()


async def test_a_group_over_a_server(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, config) as (w, client), serve(config, run=w.run):
        await client.wait_ready()
        await client.refresh()
        group = await w.play(client)
        assert [len(sample.turns) for sample in group.samples] == [3, 3, 3]
        assert [sample.score for sample in group.samples] == [0.75] * 3
        assert [part.name for part in group.samples[0].parts] == ["environment", "environment/seen"]
        assert all(episode.seconds > 0 for episode in group.episodes)
        shown = json.loads(group.episodes[0].messages)
        assert [message["content"] for message in shown[::2]] == [w.prompts[0].plain, "turn 1", "turn 2"]


async def test_bounds_end_an_episode_with_its_rewards_so_far(redis, run_id, tmp_path, config):
    endless = config.model_copy(update={"options": {"turns": 99}})
    async with hosted(redis, run_id, tmp_path, endless) as (w, client), serve(endless, run=w.run):
        await client.refresh()
        task = await w.admit()
        group = await w.play(client, task, WIDE.__class__(2, 128, 3600.0))
        assert {episode.outcome for episode in group.episodes} == {experience_pb2.OUTCOME_TURNS}
        assert [sample.score for sample in group.samples] == [0.5] * 3


async def test_a_server_that_dies_costs_its_episodes_one_try(redis, run_id, tmp_path, config, monkeypatch, caplog):
    """It is asked again and again, since its lease lives on."""
    monkeypatch.setattr(environment_client, "_REST_SECONDS", 0.01)
    async with hosted(redis, run_id, tmp_path, config) as (w, client):
        async with serve(config, run=w.run, grace=0.0):
            await client.refresh()
            w.replicas[0].engine.step_seconds = 0.05
            playing = asyncio.create_task(w.play(client))
            await w.replicas[0].asked.wait()
        w.replicas[0].engine.step_seconds = 0.0
        while caplog.text.count("answered UNAVAILABLE") < 8:
            assert not playing.done()
            await asyncio.sleep(0.01)
        async with serve(config, run=w.run):
            await client.refresh()
            group = await playing
        assert [len(sample.turns) for sample in group.samples] == [3, 3, 3]


@pytest.mark.parametrize("keepers", [True, False], ids=["keeper", "worker"])
async def test_a_server_that_loses_a_process_plays_on(redis, run_id, tmp_path, config, monkeypatch, keepers):
    """Its episodes begin again there, although a server that fails gets none for a while."""
    monkeypatch.setattr(environment_client, "_REST_SECONDS", 3600.0)
    async with hosted(redis, run_id, tmp_path, config) as (w, client), serve(config, run=w.run):
        await client.refresh()
        w.replicas[0].engine.step_seconds = 0.05
        playing = asyncio.create_task(w.play(client))
        await w.replicas[0].asked.wait()
        processes = [
            each for each in psutil.Process().children(recursive=True) if "polyreme_environment.worker" in command_line(each)
        ]
        for process in [
            each for each in processes if (each.ppid() == os.getpid()) == keepers
        ]:  # a keeper's death ends its workers
            process.kill()
        w.replicas[0].engine.step_seconds = 0.0
        group = await playing
        assert [len(sample.turns) for sample in group.samples] == [3, 3, 3]


async def test_without_a_server_the_run_fails_in_time(redis, run_id, tmp_path, config):
    hasty = config.model_copy(update={"start_timeout": 0.3})
    async with hosted(redis, run_id, tmp_path, hasty) as (w, client):
        with pytest.raises(UnavailableError, match="1 environment server within"):
            await client.wait_ready()
        with pytest.raises(UnavailableError, match="an environment server within"):
            await w.play(client)


async def test_an_episode_that_waits_for_a_server_can_be_cancelled(redis, run_id, tmp_path, config):
    """Also in the moment in which it hears of a change."""
    async with hosted(redis, run_id, tmp_path, config) as (_, client):
        for turns in range(12):  # of the event loop, between the change and the end
            waiting = asyncio.create_task(client.play(None, None))
            await asyncio.sleep(0.01)
            await client.refresh()
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            ended, _ = await asyncio.wait({waiting}, timeout=30)
            assert ended and waiting.cancelled(), turns


async def test_a_failed_environment_is_no_reward(redis, run_id, tmp_path, config):
    config.file.write_text(ENVIRONMENT.replace("0.25, done", "float('nan'), done"))
    async with hosted(redis, run_id, tmp_path, config) as (w, client), serve(config, run=w.run):
        await client.refresh()
        with pytest.raises(EpisodeError, match="a finite reward of step; found nan"):
            await w.play(client)


async def test_a_full_server_plays_the_episodes_one_after_the_other(redis, run_id, tmp_path, config):
    narrow = config.model_copy(update={"episodes": 1})
    async with hosted(redis, run_id, tmp_path, narrow) as (w, client), serve(narrow, run=w.run):
        await client.refresh()
        assert len((await w.play(client)).episodes) == 3


async def test_a_run_over_its_iterations(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, config) as (w, _), serve(config, run=w.run):
        await asyncio.gather(orchestrate(w.run), w.learner.train([1, 2], w.replicas))
        assert (await w.log.audit()).clean and sorted(w.learner.trained) == [1, 2]
        for groups in w.learner.trained.values():
            for group in groups:
                assert [len(sample.turns) for sample in group.samples] == [3, 3, 3] and group.mean_reward == 0.75


@pytest.mark.parametrize(("correctness", "metrics"), [(True, {"accuracy", "pass@1", "pass@2"}), (False, {"score"})])
async def test_held_out_tasks_are_played_by_one_version(redis, run_id, tmp_path, config, correctness, metrics):
    config.file.write_text(ENVIRONMENT.replace("0.25, done", "float(done and self.seed % 2), done"))
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}+1=", "answer": "?"}) for n in range(4)))
    playing = config.model_copy(update={"correctness": correctness})
    held_out = {"data": {"eval": str(tmp_path / "eval.jsonl")}, "eval_answers": 2, "eval_temperature": 0.5}
    async with hosted(redis, run_id, tmp_path, playing, **held_out) as (w, _), serve(playing, run=w.run):
        await asyncio.gather(orchestrate(w.run), w.learner.train([1, 2], w.replicas))
        assert (await w.log.audit()).clean and sorted(w.learner.trained) == [1, 2]
        first, last = [record for _, record in await w.run.records("0", 0) if record["kind"] == "eval"]
        assert {call.sampling.temperature for call in w.replicas[0].calls} == {1.0, 0.5}, "training's and the evaluation's"
    assert (first["version"], last["version"]) == (0, 2)
    assert first.keys() & {"accuracy", "score", "pass@1", "pass@2"} == metrics
    lines = [json.loads(line) for line in (w.config.run_dir / "samples" / "evaluation_0000.jsonl").read_text().splitlines()]
    assert [(line["row"], line["answer"]) for line in lines] == [divmod(place, 2) for place in range(8)]
    assert {line["score"] for line in lines} == {0.0, 1.0}, "each episode has its seed"
    assert first["mean@2"] == sum(line["score"] for line in lines) / 8
    assert first["parts"].keys() == {"environment", "environment/seen"}
    for line in lines:
        assert len(line["turns"]) == 3 and line["outcome"] == "stop"
        assert line["tokens"] == sum(turn["end"] - turn["start"] for turn in line["turns"])


async def test_an_evaluation_plays_failed_episodes_again_and_then_says_why(redis, run_id, tmp_path, config):
    config.file.write_text(ENVIRONMENT.replace("act = getattr", "act = self.row['answer'] == 'bad' and self.do_raise; getattr"))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "bad"}))
    held_out = {"data": {"eval": str(tmp_path / "eval.jsonl")}}
    async with hosted(redis, run_id, tmp_path, config, **held_out) as (w, _), serve(config, run=w.run):
        await asyncio.gather(orchestrate(w.run), w.learner.train([1, 2], w.replicas))
        failed = [record for _, record in await w.run.records("0", 0) if record["kind"] == "eval_failed"]
    assert sorted(w.learner.trained) == [1, 2], "the training goes on"
    assert "ValueError: no good" in failed[0]["text"]


async def test_a_run_whose_environment_always_fails_ends_and_says_why(redis, run_id, tmp_path, config):
    config.file.write_text(ENVIRONMENT.replace("act = getattr", "act = self.do_raise; getattr"))
    async with hosted(redis, run_id, tmp_path, config) as (w, _), serve(config, run=w.run):
        with pytest.raises(RunFailedError, match="ValueError: no good"):
            await asyncio.wait_for(orchestrate(w.run), 120)


async def test_a_successor_plays_on(redis, run_id, tmp_path, config):
    async with hosted(redis, run_id, tmp_path, config) as (w, _), serve(config, run=w.run):
        w.replicas[0].engine.step_seconds = 0.02
        killed = asyncio.create_task(orchestrate(w.run))
        await w.replicas[0].asked.wait()
        killed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await killed
        w.replicas[0].engine.step_seconds = 0.0
        await asyncio.gather(orchestrate(w.run), w.learner.train([1, 2], w.replicas))
        assert (await w.log.audit()).clean
        assert {group.attempt for groups in w.learner.trained.values() for group in groups} == {1}
