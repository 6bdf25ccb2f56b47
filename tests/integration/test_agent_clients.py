"""Public clients and agent packages, unmodified, on a real model through a real environment server: each gives one exact sample an episode."""

import asyncio
import json
import os
import shutil
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from polyreme.config.environment import EnvironmentConfig
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import RunState
from polyreme_environment.foreign_process import run_foreign
from polyreme_environment.server import serve
from polyreme_environment.verifiers.programs import SERVE, configuration
from polyreme_environment.verifiers.tasks import read_tasks
from polyreme_trainer.orchestrator.environment.environment_client import EnvironmentClient
from polyreme_trainer.orchestrator.environment.protocol import Task
from polyreme_trainer.orchestrator.environment.session import Bounds
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool
from support.episode_world import EpisodeWorld
from support.own_venv import own_venv
from support.replicas import Learner, hf_weights, model_files, replica
from support.simulated import config_tree
from support.table_policy import ARGUMENTS, CONTEXT, GUESSING, MULTIPLYING, THOUGHT, TablePolicy

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "clients"
HOST = ROOT / "tests" / "support" / "agent_host.py"
OWN = ("chat", "chat_stream", "completions", "responses", "responses_stream", "messages", "messages_stream")
PACKAGES = ("anthropic_agent", "openai_agents_agent", "openai_agents_chat", "langgraph_agent", "litellm_agent", "inspect_agent")
BRANCHING = "smolagents_agent"

AGENT = """
import json, types
import anthropic, openai

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
NAMED = {"name": "multiply", "description": "Multiplies."}

def multiply(arguments):
    return str(arguments["a"] * arguments["b"])

def run(task, base_url, api_key):
    kind, _, stream = task["client"].partition("_")
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    if kind == "messages":
        client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    return float(globals()[kind](client, task["prompt"], bool(stream)) == "408")

def chat(client, question, stream):
    messages = [{"role": "user", "content": question}]
    same = {"model": "policy", "tools": [{"type": "function", "function": {**NAMED, "parameters": PARAMETERS}}]}
    while True:
        reply = client.chat.completions.create(messages=messages, stream=stream, **same)
        message = whole(reply) if stream else reply.choices[0].message
        if not message.tool_calls:
            return message.content
        (call,) = message.tool_calls
        again = {"name": "multiply", "arguments": '{"b": 34, "a": 12}'}
        calls = [{"id": call.id, "type": "function", "function": again}]
        result = multiply(json.loads(call.function.arguments))
        messages += [{"role": "assistant", "content": message.content, "tool_calls": calls}]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": result}]

def whole(chunks):
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    text = "".join(delta.content or "" for delta in deltas)
    return types.SimpleNamespace(content=text or None, tool_calls=[call for delta in deltas for call in delta.tool_calls or ()])

def completions(client, question, stream):
    def complete(prompt, **bounds):
        return client.completions.create(model="policy", prompt=prompt, **bounds).choices[0].text
    begun = complete(question, max_tokens=1)
    return begun + complete(question + begun)

def responses(client, question, stream):
    same = {"model": "policy", "tools": [{"type": "function", **NAMED, "parameters": PARAMETERS}]}
    items = [{"role": "user", "content": question}]
    while True:
        if stream:
            with client.responses.stream(input=items, **same) as events:
                reply = events.get_final_response()
        else:
            reply = client.responses.create(input=items, **same)
        calls = [item for item in reply.output if item.type == "function_call"]
        if not calls:
            return reply.output_text
        outputs = [multiply(json.loads(call.arguments)) for call in calls]
        items += [item.to_dict() for item in reply.output if item.type != "reasoning"]
        items += [{"type": "function_call_output", "call_id": c.call_id, "output": o} for c, o in zip(calls, outputs)]

def messages(client, question, stream):
    same = {"model": "policy", "max_tokens": 64, "system": "You multiply.", "tools": [{**NAMED, "input_schema": PARAMETERS}]}
    history = [{"role": "user", "content": question}]
    while True:
        if stream:
            with client.messages.stream(messages=history, **same) as events:
                reply = events.get_final_message()
        else:
            reply = client.messages.create(messages=history, **same)
        history.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return reply.content[0].text
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": multiply(call.input)} for call in calls]
        history.append({"role": "user", "content": results})
"""


@asynccontextmanager
async def policy(redis_url, run_id, folder, rows, environment, table: TablePolicy = MULTIPLYING):
    """Yields a function that plays two episodes of a row, by its client, on a replica of the model."""
    model = table.write(folder / "model")
    config = config_tree(
        folder,
        rows,
        groups_per_iteration=len(rows),
        group_size=2,
        model={"path": str(model), "dtype": "float32"},
        rollout={"engine": "transformers", "max_new_tokens": 64, "max_model_len": CONTEXT},
        reward=None,
        environment=environment.model_dump(mode="json", exclude_defaults=True),
    )
    async with AsyncExitStack() as life:
        there = await life.enter_async_context(replica(redis_url, run_id, model, folder / "replica.log", config))
        log = ExperienceLog(there.run)
        await log.take(Writer.LEARNER)
        assert log.term is not None
        learner = Learner.of(run_id, model, log.term.counter)
        life.callback(learner.arena.close)
        await log.begin(0)
        await learner.push(there.weights, 0, hf_weights(model))
        await log.ack_commit(there.lease.id, 0, log.term.counter, 0.0, 0.0)
        await there.run.set_state(RunState.RUNNING)
        pool = ReplicaPool(there.run, ExperienceLog(there.run), start_timeout=60.0, capacity=12)
        life.push_async_callback(pool.close)
        await pool.refresh()
        world = EpisodeWorld(there.run, config, [], None, pool, model_files(model))
        await life.enter_async_context(serve(environment, run=there.run, grace=0.0))
        client = EnvironmentClient(there.run, environment, config.data, config.seed)
        life.push_async_callback(client.close)
        await client.refresh()
        await world.log.take(Writer.ORCHESTRATOR)
        prompts = {json.loads(prompt.metadata_json)["client"]: prompt for prompt in world.prompts}

        async def play(name):
            (admission,) = await world.log.admit(1)
            return await world.play(client, Task(admission, prompts[name]), Bounds(8, CONTEXT, 300.0))

        yield play


def questions(clients):
    return [{"prompt": "12 * 34 =", "answer": "408", "client": client} for client in clients]


def check_exact(group, table=MULTIPLYING):
    """Every token of a turn has the log-probability that the model gives it behind the token before it, and only they are trained on."""
    for sample in group.samples:
        prompt = group.prompt_of(sample).tolist()
        ids = [*prompt, *sample.token_ids.tolist()]
        turns = {place for turn in sample.turns for place in range(turn.start, turn.end)}
        for place, number in enumerate(sample.logprobs):
            at = len(prompt) + place
            assert number == pytest.approx(table.logprob(ids[at - 1], ids[at]) if place in turns else 0.0, abs=1e-3)
            assert bool(sample.loss_mask[place]) == (place in turns)


@pytest.mark.real
async def test_public_clients_give_one_exact_sample(redis_url, run_id, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    environment = EnvironmentConfig(file=tmp_path / "agent.py", function="run", start_timeout=120.0)
    async with policy(redis_url, run_id, tmp_path, questions(OWN), environment) as play:
        sampled = set()
        for client in OWN:
            group = await play(client)
            check_exact(group)
            assert [(len(sample.turns), sample.score) for sample in group.samples] == [(2, 1.0)] * 2, client
            sampled |= {MULTIPLYING.names[id] for sample in group.samples for id in sample.token_ids.tolist()}
        assert {THOUGHT, *ARGUMENTS, "408", "8"} <= sampled, "answers that clients write differently, or tokens that no text has"


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A Python with the packages."""
    return own_venv("clients", tmp_path_factory.mktemp("clients")) / "python"


@asynccontextmanager
async def host(python, folder):
    """Yields the URL of a program that runs the agents of the examples."""
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    chat = (folder / "openai_agents_agent.py").read_text().replace("OpenAIResponsesModel", "OpenAIChatCompletionsModel")
    (folder / "openai_agents_chat.py").write_text(chat)
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    process = await asyncio.create_subprocess_exec(
        python, HOST, folder, stdout=asyncio.subprocess.PIPE, env={**os.environ, **variables}, cwd=folder
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}/run"
    finally:
        process.kill()
        await process.communicate()


@pytest.mark.real
@pytest.mark.slow
async def test_agent_packages_give_one_exact_sample(redis_url, run_id, tmp_path, packages):
    (agents := tmp_path / "agents").mkdir()
    async with host(packages, agents) as url:
        environment = EnvironmentConfig(url=url, episodes=1)  # the program runs one agent at a time
        async with policy(redis_url, run_id, tmp_path, questions((*PACKAGES, BRANCHING)), environment) as play:
            for client in PACKAGES:
                group = await play(client)
                check_exact(group)
                assert [(len(sample.turns), sample.score) for sample in group.samples] == [(2, 1.0)] * 2, client
            group = await play(BRANCHING)
            check_exact(group)
            assert {len(sample.turns) for sample in group.samples} == {1} and len(group.samples) > 2


# The env server of verifiers renders and reads tokens by itself, and asks the session address for those between.
TRAINING = """
import json
from polyreme_environment.verifiers.episode import EpisodeDeltas
from polyreme_environment.verifiers.wire import EnvServerClient

async def run(task, base_url, api_key):
    renderer = {"renderer_model_name": task["model"], "renderer": {"name": "qwen3", "thinking_retention": "all"}}
    client = {"type": "train", "base_url": base_url, "headers": {"Authorization": f"Bearer {api_key}"}, "api_key_var": "NONE", **renderer}
    server, episode, nodes = EnvServerClient(task["server"]), EpisodeDeltas(), []
    def add(delta):
        episode.add(delta)
        nodes.extend(delta.get("nodes", ()))
    try:
        sampling = {"temperature": 1.0, "max_tokens": 8}
        body = {"task_data": task["task"], "client": client, "model": "policy", "sampling": sampling}
        result = episode.result(await server.run(body, add))
    finally:
        await server.close()
    with open(task["traces"], "a") as out:
        print(json.dumps([[node["token_ids"], node["mask"], node["logprobs"]] for node in nodes]), file=out)
    return result.reward
"""


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(1800)  # four programs, each with large imports
async def test_a_train_client_of_verifiers_has_the_same_tokens(redis_url, run_id, tmp_path, tmp_path_factory, monkeypatch):
    """What the package's renderer and client have recorded of an episode, token by token, is what is trained on."""
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent / "guess_number"))
    venv, options = (
        own_venv("verifiers", tmp_path_factory.mktemp("verifiers")).parent,
        {"player": {"runtime": {"type": "subprocess"}}},
    )
    package = EnvironmentConfig(verifiers="guess_verifiers", venv=venv, options=options, start_timeout=600.0)
    address, traces = f"ipc://{tmp_path}/server", tmp_path / "traces.jsonl"
    (row,) = read_tasks(package, 1)
    row |= {"client": "train", "server": address, "model": str(tmp_path / "model"), "traces": str(traces)}
    (tmp_path / "agent.py").write_text(TRAINING)
    environment = EnvironmentConfig(file=tmp_path / "agent.py", function="run", start_timeout=120.0)
    server = await run_foreign("verifiers", venv, SERVE, [configuration(package), address, "1"], ())
    try:
        async with policy(redis_url, run_id, tmp_path, [row], environment, GUESSING) as play:
            group = await play("train")
    finally:
        await server.close()
    check_exact(group, GUESSING)
    found, told = [], []
    for sample in group.samples:
        ids, mask = group.prompt_of(sample).tolist() + sample.token_ids.tolist(), sample.loss_mask.tolist()
        found.append((ids, [number for number, at in zip(sample.logprobs.tolist(), mask, strict=True) if at]))
    for nodes in map(json.loads, traces.read_text().splitlines()):
        told.append(([id for ids, _, _ in nodes for id in ids], [number for _, _, numbers in nodes for number in numbers]))
    assert len(found) == len(told) == 2
    for (ids, logprobs), (told_ids, told_logprobs) in zip(sorted(found), sorted(told), strict=True):
        assert told_ids[: len(ids)] == ids and told_logprobs == pytest.approx(logprobs)
