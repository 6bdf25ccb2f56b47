"""Public clients and agent packages, unmodified, on a real model through a real environment server: each gives one exact sample an episode."""

import asyncio
import json
import os
import shutil
import subprocess
import venv
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from polyreme.config.environment import EnvironmentConfig
from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.run import RunState
from polyreme_environment.server import serve
from polyreme_trainer.orchestrator.environment.environment_client import EnvironmentClient
from polyreme_trainer.orchestrator.environment.protocol import Task
from polyreme_trainer.orchestrator.environment.session import Bounds
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool
from support.episode_world import EpisodeWorld
from support.multiplying_policy import ARGUMENTS, CONTEXT, THOUGHT, VOCABULARY, logprob, write_policy
from support.replicas import Learner, hf_weights, model_files, replica
from support.simulated import config_tree

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "clients.txt"
EXAMPLES = ROOT / "examples" / "clients"
HOST = ROOT / "tests" / "support" / "agent_host.py"
OWN = ("chat", "chat_stream", "completions", "responses", "responses_stream", "messages", "messages_stream")
PACKAGES = ("anthropic_agent", "openai_agents_agent", "openai_agents_chat", "langgraph_agent", "litellm_agent", "inspect_agent")
BRANCHING = "smolagents_agent"
NAMES = {place: token for token, place in VOCABULARY.items()}

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
async def policy(redis_url, run_id, folder, clients, environment):
    """Yields a function that plays two episodes of a client, on a replica of the model."""
    model = write_policy(folder / "model")
    config = config_tree(
        folder,
        [{"prompt": "12 * 34 =", "answer": "408", "client": client} for client in clients],
        groups_per_iteration=len(clients),
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
        rows = {json.loads(prompt.metadata_json)["client"]: prompt for prompt in world.prompts}

        async def play(name):
            (admission,) = await world.log.admit(1)
            return await world.play(client, Task(admission, rows[name]), Bounds(8, CONTEXT, 300.0))

        yield play


def check_exact(group):
    """Every token of a turn has the log-probability that the model gives it behind the token before it, and only they are trained on."""
    for sample in group.samples:
        prompt = group.prompt_of(sample).tolist()
        names = [NAMES[id] for id in (*prompt, *sample.token_ids.tolist())]
        turns = {place for turn in sample.turns for place in range(turn.start, turn.end)}
        for place, number in enumerate(sample.logprobs):
            at = len(prompt) + place
            assert number == pytest.approx(logprob(names[at - 1], names[at]) if place in turns else 0.0, abs=1e-3)
            assert bool(sample.loss_mask[place]) == (place in turns)


@pytest.mark.real
async def test_public_clients_give_one_exact_sample(redis_url, run_id, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    environment = EnvironmentConfig(file=tmp_path / "agent.py", function="run", start_timeout=120.0)
    async with policy(redis_url, run_id, tmp_path, OWN, environment) as play:
        sampled = set()
        for client in OWN:
            group = await play(client)
            check_exact(group)
            assert [(len(sample.turns), sample.score) for sample in group.samples] == [(2, 1.0)] * 2, client
            sampled |= {NAMES[id] for sample in group.samples for id in sample.token_ids.tolist()}
        assert {THOUGHT, *ARGUMENTS, "408", "8"} <= sampled, "answers that clients write differently, or tokens that no text has"


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A Python with the packages, in a separate environment, since their lock differs from ours. POLYREME_CLIENTS names an existing one."""
    if given := os.environ.get("POLYREME_CLIENTS"):
        return Path(given)
    home = tmp_path_factory.mktemp("clients")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-r", LOCK], check=True, timeout=1800)
    return python


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
        async with policy(redis_url, run_id, tmp_path, (*PACKAGES, BRANCHING), environment) as play:
            for client in PACKAGES:
                group = await play(client)
                check_exact(group)
                assert [(len(sample.turns), sample.score) for sample in group.samples] == [(2, 1.0)] * 2, client
            group = await play(BRANCHING)
            check_exact(group)
            assert {len(sample.turns) for sample in group.samples} == {1} and len(group.samples) > 2
