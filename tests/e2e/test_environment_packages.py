"""Environments of other packages, as the page about them configures them: 50 iterations each, with a tiny policy on the transformers engine.

A test shows that its run trains, by a reward that rises, or, where so small a policy cannot learn the task, that all iterations run and the audit
is clean. Its docstring says which.
"""

import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from polyreme.net.ports import free_port
from support import guide
from support.own_venv import own_venv
from support.small_policy import write_run
from support.whole_run import Up

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(3600)]  # installs the packages

ITERATIONS = 50
Rows = list[dict[str, Any]]


def trained(config: Path, turns: int) -> tuple[Rows, Rows]:
    """Runs it. Returns the records of its iterations and all samples.

    Nothing has failed and nothing is left; every iteration has trained on the tokens that were sampled, in episodes of at most `turns` turns.
    """
    up = Up(config)
    assert up.wait(3000) == 0, up.output
    assert not up.leftovers()
    audit = subprocess.run(
        [sys.executable, "-m", "polyreme", "audit", str(up.run_dir)], capture_output=True, text=True, timeout=300
    )
    assert audit.returncode == 0, audit.stdout
    records = up.records("iteration")
    assert [record["iteration"] for record in records] == list(range(1, ITERATIONS + 1))
    assert all(record["mismatch_kl"] < 1e-4 for record in records)
    paths = [up.run_dir / "samples" / f"iteration_{number:04d}.jsonl" for number in range(1, ITERATIONS + 1)]
    samples = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    assert all(1 <= len(sample["turns"]) <= turns and "environment" in sample["parts"] for sample in samples)
    print(config.parent.name, [round(record["reward/mean"], 2) for record in records])
    return records, samples


def mean(records: Rows, name: str = "reward/mean") -> float:
    return sum(record[name] for record in records) / len(records)


def write_tasks(config: Path, count: int) -> Rows:
    """Writes the environment's tasks to data.train. Returns them."""
    words = [sys.executable, "-m", "polyreme", "environment", "tasks", str(config), "--count", str(count)]
    subprocess.run(words, check=True, timeout=300)
    return [json.loads(line) for line in (config.parent / "tasks.jsonl").read_text().splitlines()]


def call(name: str, arguments: dict[str, Any], result: str) -> Rows:
    """An answer that calls a tool, and the result."""
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [made]}, {"role": "tool", "content": result}]


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def declared(task: dict[str, Any]) -> tuple[Rows, Rows]:
    """Messages and tools of a row of NeMo Gym, in the form of chat completions."""
    given = task["task"]["responses_create_params"]
    keys = ("name", "description", "parameters")
    return given["input"], [{"type": "function", "function": {key: tool[key] for key in keys}} for tool in given["tools"]]


def gym(folder: Path, made: pytest.TempPathFactory, block: str) -> Rows:
    """The tasks of an environment of NeMo Gym."""
    (folder / "gym").symlink_to(own_venv("nemo-gym", made.mktemp("nemo-gym"), "python3.13").parent)
    return write_tasks(write_run(folder, block, [], 1), 64)


def called(sample: dict[str, Any]) -> Rows:
    return [call for turn in sample["turns"] for call in turn["tool_calls"]]


def test_a_single_tool_call_of_nemo_gym(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It trains: the policy starts with a call in one of four answers, and learns to call always."""
    tasks, rng, rows = gym(tmp_path, tmp_path_factory, "weather.yaml"), random.Random(0), []
    for _ in range(400):
        messages, tools = declared(rng.choice(tasks))
        if rng.random() < 0.25:
            city = rng.choice(["sf", "rome"])
            found = {"city": city, "weather_description": f"The weather in {city} is cold."}
            messages = [*messages, *call("get_weather", {"city": city}, json.dumps(found, separators=(",", ":")))]
        rows.append({"messages": [*messages, say("It is cold.")], "tools": tools})
    records, samples = trained(write_run(tmp_path, "weather.yaml", rows, 60, rollout={"max_new_tokens": 24}), 6)
    for sample in samples:
        is_called = any(each["name"] == "get_weather" for each in called(sample))
        assert sample["score"] == float(is_called) or sample["finish_reason"] == "length", (
            "only a cut answer's calls are not made"
        )
    assert mean(records[:2]) < 0.6 and mean(records[-10:]) > 0.9
    assert mean(records[-10:], "episode/tool_calls") > 0.9


def write_words(folder: Path, words: Sequence[str]) -> None:
    """Writes what the word games read of NLTK: lists of words, and a tagger that knows each as a noun."""
    lists, tagger = folder / "corpora" / "words", folder / "taggers" / "averaged_perceptron_tagger_eng"
    lists.mkdir(parents=True)
    tagger.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (lists / name).write_text("".join(f"{word}\n" for word in words))
    for kind, value in (("weights", {}), ("tagdict", dict.fromkeys(words, "NN")), ("classes", ["NN"])):
        (tagger / f"averaged_perceptron_tagger_eng.{kind}.json").write_text(json.dumps(value))


WORKPLACE = {
    "email_reply_email": "Email replied successfully.",
    "calendar_update_event": "Event updated successfully.",
    "update_customer": "Customer updated successfully.",
    "delete_customer": "Customer deleted successfully.",
}
"""What the tools of the package's example tasks answer."""


def test_the_workplace_assistant_of_nemo_gym(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It runs: the policy does one in three tasks, by one to five calls of its 27 tools, and else only says that it has."""
    tasks, rng, rows = gym(tmp_path, tmp_path_factory, "workplace.yaml"), random.Random(0), []
    for _ in range(400):
        task = rng.choice(tasks)
        messages, tools = declared(task)
        if rng.random() < 0.35:
            for each in task["task"]["ground_truth"]:
                result = json.dumps({"output": WORKPLACE[each["name"].rpartition("_manager_")[2]]}, separators=(",", ":"))
                messages = [*messages, *call(each["name"], json.loads(each["arguments"]), result)]
        rows.append({"messages": [*messages, say("It is done.")], "tools": tools})
    assert all(len(row["tools"]) == 27 for row in rows)
    texts = {message["content"] for task in tasks for message in declared(task)[0]}
    texts |= {f"{tool['function']['name']}: {tool['function']['description']}" for row in rows for tool in row["tools"]}
    given = {"rollout": {"max_new_tokens": 96}}
    _, samples = trained(write_run(tmp_path, "workplace.yaml", rows, 80, sorted(texts), **given), 6)
    for sample in samples:
        assert sample["score"] in (0.0, 1.0) and (called(sample) or sample["score"] == 0.0)
        assert all(json.loads(each["result"])["output"] for each in called(sample))
    assert any(sample["score"] == 1.0 for sample in samples)


INVALID = "You attempted an invalid move. Reason: it is not an English word. Please resubmit a valid move."


def test_wordle_through_verifiers(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs: half of the guesses that the policy starts from are no words, and two of these in a row end the game, which starts with a second of
    computing."""
    words = ["apple", "brick", "candy", "dough", "eagle", "flame", "juice", "river"]
    write_words(tmp_path / "nltk", words)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.setenv("PYTHONPATH", str(guide.ROOT / "examples" / "guess_number"))
    (tmp_path / "games").symlink_to(own_venv("verifiers", tmp_path_factory.mktemp("verifiers")).parent)
    task = write_tasks(write_run(tmp_path, "wordle.yaml", [], 1), 64)[0]["task"]
    rng, rows = random.Random(0), []
    for _ in range(400):
        messages = [{"role": "system", "content": task["system_prompt"]}, {"role": "user", "content": task["prompt"]}]
        left = rng.sample(words, 6)
        while left:
            word = left.pop() if rng.random() < 0.5 else rng.choice(["aaaaa", "eeeee"])
            marks = f"{' '.join(word.upper())}\n{' '.join(rng.choices('GYX', k=5))}\nYou have {len(left)} guesses left."
            messages += [say(f"[{word}]"), {"role": "user", "content": marks if word in words else INVALID}]
        rows.append({"messages": messages[:-1]})
    texts = [task["system_prompt"], task["prompt"]]
    few = {"groups_per_iteration": 1, "group_size": 4}  # the second before each game is the most of the run
    _, samples = trained(write_run(tmp_path, "wordle.yaml", rows, 40, texts, **few), 12)
    for sample in samples:
        assert 0.0 <= sample["score"] <= 1.0 and sample["messages"][1]["content"] == task["prompt"]
        said = [message["content"] for message in sample["messages"][2:]]
        for turn, told in zip(said[::2], said[1::2], strict=False):  # nothing is told of the last one
            word = "".join(re.findall(r"\[(\w+)\]", turn)[:1])
            is_word = word in words and "already" not in told
            assert told.startswith(" ".join(word.upper()) + "\n" if is_word else "You attempted an invalid move."), told
    assert any(sample["score"] == 1.0 for sample in samples)


def test_text_to_sql_through_openenv(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It trains: the policy looks into the table in two of five episodes, else it guesses one of eight answers; it learns to look."""
    rng, rows = random.Random(0), []
    tools = [{"type": "function", "function": {"name": name, "description": text, "parameters": {}}}
             for name, text in (("query", "Runs one SQL query on the table ships(name, oars)."), ("submit", "Ends the episode."))]  # fmt: skip
    answers = ["12", "17", "23", "38", "41", "60", "85", "99"]
    for _ in range(400):
        oars = rng.choice(answers)
        messages: Rows = [{"role": "user", "content": "How many oars has ship a?"}]
        if rng.random() < 0.4:
            messages += call("query", {"sql": "select oars from ships where name='a'"}, f"[({oars},)]")
        rows.append({"messages": [*messages, call("submit", {"answer": oars}, "")[0]], "tools": tools})
    port = free_port()
    at = {"environment": {"openenv": f"http://127.0.0.1:{port}"}, "rollout": {"max_new_tokens": 48}}
    config = write_run(tmp_path, "ships.yaml", rows, 100, **at)
    tasks = [{"prompt": "How many oars has ship a?", "answer": answer} for answer in answers]
    (tmp_path / "ships.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    commands = own_venv("openenv", tmp_path_factory.mktemp("openenv"))
    server = subprocess.Popen([commands / "python", tmp_path / "ships.py", str(port)])
    try:
        records, samples = trained(config, 4)
    finally:
        server.terminate()
        server.wait(30)
    for sample in samples:
        assert all(each["error"] or each["result"].startswith("[") for each in called(sample) if each["name"] == "query")
        assert sample["score"] == 0.0 or "submit" in [each["name"] for each in called(sample)]
    assert mean(records[:5]) < 0.6 and mean(records[-10:]) > mean(records[:5]) + 0.15


def test_a_generator_of_reasoning_gym(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs: half of the answers that the policy starts from are right, which teaches it numbers and no sums."""
    (site,) = own_venv("reasoning-gym", tmp_path_factory.mktemp("reasoning-gym")).parent.glob("lib/python*/site-packages")
    monkeypatch.setenv("PYTHONPATH", str(site))
    guide.write_files("environment-packages.md", tmp_path)
    subprocess.run([sys.executable, "make_questions.py"], cwd=tmp_path, check=True, timeout=300)
    rng, rows = random.Random(0), []
    for line in (tmp_path / "questions.jsonl").read_text().splitlines():
        entry = json.loads(line)["entry"]
        answer = rng.choice([entry["answer"], str(rng.randint(-8, 18))])
        rows.append({"messages": [{"role": "user", "content": entry["question"]}, say(answer)]})
    _, samples = trained(write_run(tmp_path, "reasoning.yaml", rows, 150, groups_per_iteration=12), 1)
    assert all(0.0 <= sample["score"] <= 1.0 for sample in samples)
    assert any(sample["score"] == 1.0 for sample in samples)
