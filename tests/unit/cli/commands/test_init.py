"""The files of `polyreme init` can start a run."""

import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
import yaml
from pyarrow import parquet
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

from polyreme.cli.main import build_app
from polyreme.cli.new_run import sample_environment
from polyreme.cli.new_run.files import REWARDS, SAMPLE, TINY, Answers, find_columns, write_new_run
from polyreme.cli.new_run.sample_data import EXAMPLES, rows, supervised_rows
from polyreme.config.load import load_any, load_config
from polyreme.dataset.source import read_objects
from polyreme.errors import ConfigError, DataError
from polyreme.rundir.checks import findings
from polyreme_environment.contract import begun, choose, moved
from support.tiny_tokenizer import model_files


def own_files(folder: Path) -> tuple[Path, Path]:
    """A model directory and a data file that a user may have."""
    model = folder / "own-model"
    model.mkdir()
    for name, content in model_files().items():
        (model / name).write_bytes(content)
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    data = folder / "own.jsonl"
    data.write_text('{"id": 1, "question": "1+1", "solution": "2"}\n')
    return model, data


@pytest.mark.parametrize(("model", "data", "reward"), [*itertools.product((TINY, "own"), (SAMPLE, "own"), REWARDS)])
def test_config_check_passes_for_each_choice(tmp_path: Path, model: str, data: str, reward: str) -> None:
    own_model, own_data = own_files(tmp_path)
    answers = Answers(
        name="mine",
        model=str(own_model) if model == "own" else TINY,
        data=str(own_data) if data == "own" else SAMPLE,
        reward=reward,
        prompt_key="question",
        label_key="solution",
    )
    if reward == "choice" and data == "own":
        own_data.write_text('{"question": "A) 1 B) 2", "solution": "B"}\n')
    created = write_new_run(tmp_path / "new", answers)
    found = findings(load_any(tmp_path / "new" / "run.yaml"))
    assert found.errors == ()
    assert created[0] == tmp_path / "new" / "run.yaml"
    assert all(path.exists() for path in created)


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_an_accelerator_trains_in_bfloat16(tmp_path: Path, device: str) -> None:
    write_new_run(tmp_path, Answers(name="mine", device=device))  # type: ignore[arg-type]
    config = load_config(tmp_path / "run.yaml")
    assert (config.device, config.model.dtype) == (device, "bfloat16")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("mine")
    with pytest.raises(ConfigError) as error:
        write_new_run(tmp_path, Answers(name="mine"))
    assert "reward.py" in error.value.expected
    assert [path.name for path in tmp_path.iterdir()] == ["reward.py"]


@pytest.mark.parametrize("answers", [Answers("mine", model="missing"), Answers("mine", data="missing.jsonl")])
def test_what_is_not_there_is_an_error_and_nothing_is_written(tmp_path: Path, answers: Answers) -> None:
    with pytest.raises(ConfigError):
        write_new_run(tmp_path / "new", answers)
    assert not (tmp_path / "new").exists()


def test_lengths_fit_the_models_context(tmp_path: Path) -> None:
    model, data = own_files(tmp_path)  # a context of 128 tokens
    write_new_run(tmp_path / "new", Answers("mine", model=str(model), data=str(data)))
    assert load_config(tmp_path / "new" / "run.yaml").rollout.max_model_len == 128


def test_the_tiny_model_has_a_token_for_each_character_and_weights_of_its_sizes(tmp_path: Path) -> None:
    write_new_run(tmp_path, Answers("mine"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode("Vowels: a, e?\n").ids) == "Vowels: a, e?\n"
    weights, config = (
        load_file(tmp_path / "model" / "model.safetensors"),
        json.loads((tmp_path / "model" / "config.json").read_text()),
    )
    assert weights["lm_head.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert 0.01 < weights["model.layers.1.mlp.up_proj.weight"].std() < 0.03
    assert (weights["model.norm.weight"] == 1).all()


@pytest.mark.parametrize("reward", REWARDS)
def test_sample_data_repeats_and_has_its_columns(reward: str) -> None:
    assert rows(reward, 5, 1) == rows(reward, 5, 1) != rows(reward, 5, 2)
    assert all(row.keys() == {"prompt", "answer"} for row in rows(reward, 5, 1))
    assert all(row.keys() == {"prompt", "response"} for row in supervised_rows(reward, 5, 1))
    assert REWARDS.keys() == EXAMPLES.keys()


@pytest.mark.parametrize("reward", REWARDS)
def test_sample_data_has_no_prompt_twice_where_there_are_many(reward: str) -> None:
    train = rows(reward, 512, 1)
    held_out = rows(reward, 64, 2, train)
    assert len({row["prompt"] for row in [*train, *held_out]}) == 512 + 64


def test_columns_are_found_in_each_format(tmp_path: Path) -> None:
    _, data = own_files(tmp_path)
    assert find_columns(data, None, None, "exact") == ("question", "solution")
    table = pyarrow.table({"prompt": [[{"role": "user", "content": "1+1"}]], "reward_model": [{"ground_truth": "2"}]})
    parquet.write_table(table, tmp_path / "verl.parquet")
    assert find_columns(tmp_path / "verl.parquet", None, None, "math") == ("prompt", "reward_model.ground_truth")
    (tmp_path / "own.csv").write_text("frage,n: #1\n1+1,2\n")
    assert find_columns(tmp_path / "own.csv", "frage", None, "python") == ("frage", "answer")
    columns = find_columns(tmp_path / "own.csv", "frage", "n: #1", "exact")
    write_new_run(tmp_path / "new", Answers("no", data=str(tmp_path / "own.csv"), prompt_key=columns[0], label_key=columns[1]))
    config = load_config(tmp_path / "new" / "run.yaml")
    assert (config.name, config.data.prompt_key, config.data.label_key) == ("no", "frage", "n: #1")


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('{"frage": "1+1", "answer": "2"}\n', (None, None, "python")),
        ('{"prompt": "1+1", "antwort": "2"}\n', (None, None, "exact")),
        ('{"prompt": "1+1", "answer": "2"}\n', ("question", None, "python")),
        ("", (None, None, "python")),
        ('{"prompt": "1+1", "ans', (None, None, "python")),
    ],
)
def test_data_without_a_usable_row_is_an_error_before_anything_is_written(
    tmp_path: Path, text: str, keys: tuple[str | None, str | None, str]
) -> None:
    (tmp_path / "own.jsonl").write_text(text)
    with pytest.raises((ConfigError, DataError)) as error:
        find_columns(tmp_path / "own.jsonl", *keys)
    assert "own.jsonl" in error.value.expected


def test_a_part_of_own_prompts_is_held_out(tmp_path: Path) -> None:
    data = tmp_path / "own.jsonl"
    data.write_text("".join(f'{{"q, {{a}}": "prompt {number}", "answer": "1"}}\n' for number in range(200)))
    write_new_run(tmp_path / "new", Answers("mine", data=str(data), prompt_key="q, {a}"))
    config = load_config(tmp_path / "new" / "run.yaml")
    trained, held_out = ({row.fields["q, {a}"] for row in read_objects(part)} for part in config.prompt_data)
    assert len(trained) + len(held_out) == 200 and not trained & held_out
    assert 0 < len(held_out) < 40


def test_an_own_reward_is_named_and_not_copied(tmp_path: Path) -> None:
    model, data = own_files(tmp_path)
    reward = tmp_path / "points.py"
    reward.write_text("def points(response):\n    return len(response)\n")
    runner, app = CliRunner(), build_app(["init"])
    words = ["init", str(tmp_path / "new"), "--model", str(model), "--data", str(data), "--reward", str(reward)]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    config = load_config(tmp_path / "new" / "run.yaml")
    assert config.reward is not None and config.reward.rewards[0].file == reward
    assert findings(config).errors == () and not (tmp_path / "new" / "reward.py").exists()
    assert "random weights" not in result.stdout
    refused = runner.invoke(app, [*words[:-1], str(tmp_path / "none.py")])
    assert isinstance(refused.exception, ConfigError)


def test_the_tiny_model_with_own_data_is_pointed_out(tmp_path: Path) -> None:
    _, data = own_files(tmp_path)
    words = ["init", str(tmp_path / "new"), "--model", TINY, "--data", str(data)]
    printed = CliRunner().invoke(build_app(["init"]), words).stdout
    assert "random weights" in printed and "cannot learn" not in printed
    data.write_text('{"question": "1+1"}\n')
    words[1] = str(tmp_path / "unlabelled")
    assert "cannot learn" in CliRunner().invoke(build_app(["init"]), words).stdout


def test_the_tiny_model_first_learns_to_write_the_answers_of_own_data(tmp_path: Path) -> None:
    """Without them a model with random weights never writes an answer that a reward accepts."""
    data = tmp_path / "own.jsonl"
    rows: list[dict[str, object]] = [{"q.text": f"{number} + 1?", "solution": number + 1} for number in range(200)]
    rows += [{"q.text": "x" * 500, "solution": "1"}, {"q.text": "no answer", "solution": None}, {"q.text": "a", "solution": {}}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = Answers("mine", data=str(data), reward="numeric", prompt_key="q.text", label_key="solution")
    write_new_run(tmp_path / "new", answers)
    config = load_config(tmp_path / "new" / "run.yaml")
    [phase] = config.trainer.sft
    assert isinstance(phase.data, Path)
    written = [json.loads(line) for line in phase.data.read_text().splitlines()]
    held_out = {row.fields["q.text"] for row in read_objects(config.prompt_data[1])}
    assert {(row["q.text"], row["response"]) for row in written} == {
        (row["q.text"], str(row["solution"])) for row in rows[:200] if row["q.text"] not in held_out
    }
    write_new_run(tmp_path / "larger", replace(answers, model=str(own_files(tmp_path)[0])))
    assert load_config(tmp_path / "larger" / "run.yaml").trainer.sft == []


@pytest.mark.parametrize(("model", "data"), [(TINY, SAMPLE), (TINY, "own"), ("own", SAMPLE), ("own", "own")])
def test_evaluations_and_saves_are_in_the_file(tmp_path: Path, model: str, data: str) -> None:
    own_model, own_data = own_files(tmp_path)
    given = Answers("mine", str(own_model) if model == "own" else TINY, str(own_data) if data == "own" else SAMPLE)
    write_new_run(tmp_path / "new", replace(given, prompt_key="question"))
    tree = yaml.safe_load((tmp_path / "new" / "run.yaml").read_text())
    assert 0 < tree["eval_interval"] < tree["iterations"] and tree["trainer"]["save_minutes"] > 0


@pytest.mark.parametrize("reward", REWARDS)
def test_random_answers_of_the_right_form_are_sometimes_right(reward: str) -> None:
    """A policy learns only from groups with better and worse answers. The warm start teaches no more than the form."""
    pairs = [EXAMPLES[reward](random.Random(seed)) for seed in range(400)]
    right = [reward == "python" or row["answer"] == answer for row, answer in pairs]
    assert 0.15 < sum(right) / len(right) <= 1.0
    deciding = {row["answer"] for row, _ in pairs}
    assert 1 < len(deciding) <= 4 and {answer for _, answer in pairs if reward != "python"} <= deciding


def test_a_name_that_no_run_may_have_and_a_file_as_the_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_new_run(tmp_path / "new", Answers("My Run!"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError):
        write_new_run(tmp_path / "file", Answers("mine"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_a_terminal_nothing_is_asked_and_columns_are_found(tmp_path: Path) -> None:
    model, data = own_files(tmp_path)
    runner, app = CliRunner(), build_app(["init"])
    words = ["init", str(tmp_path / "My Run"), "--model", str(model), "--data", str(data), "--reward", "exact"]
    result = runner.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "polyreme up" in result.stdout
    config = load_config(tmp_path / "My Run" / "run.yaml")
    assert (config.name, config.data.prompt_key, config.data.label_key) == ("my-run", "question", "solution")
    refused = runner.invoke(app, ["init", str(tmp_path / "other"), "--reward", "best"])
    assert isinstance(refused.exception, ConfigError)


def typed(folder: Path, *answers: str) -> str:
    """The output of `polyreme init folder`, whose questions a person at a terminal answers, one line each."""
    ours, theirs = os.openpty()
    with open(ours, "wb", buffering=0) as keyboard, open(theirs, "rb") as terminal:
        command = [sys.executable, "-m", "polyreme", "init", str(folder)]
        process = subprocess.Popen(command, stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        keyboard.write("".join(f"{answer}\n" for answer in answers).encode())
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def test_on_a_terminal_five_questions_are_asked(tmp_path: Path) -> None:
    output = typed(tmp_path / "new", "sums", "", "", "numeric", "")  # those that are empty stand for the default
    questions = ("Name of the run", "Model: ", "Data: ", "Reward: ", "Device: ")
    assert [output.count(question) for question in questions] == [1] * 5
    config = load_config(tmp_path / "new" / "run.yaml")
    assert config.name == "sums"
    assert config.reward is not None and config.reward.rewards[0].name == "numeric"
    assert json.loads((tmp_path / "new" / "train.jsonl").read_text().splitlines()[0])["answer"].isdigit()


def test_an_answer_that_does_not_fit_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_files(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    answers = ["My Run", "mine", "/nowhere", "~/own-model", "nowhere.csv", "~/own.jsonl", "best", "exact", "tpu", "cpu"]
    output = typed(tmp_path / "new", *answers)
    config = load_config(tmp_path / "new" / "run.yaml")
    assert (config.name, config.model.path, config.data.train) == ("mine", tmp_path / "own-model", tmp_path / "own.jsonl")
    assert output.count("expected") == 5


def play(path: Path, answer: str, *guesses: str) -> list[tuple[str, float, bool]]:
    """An episode of a written environment, as the environment server understands it: each message, reward and end."""
    names = {"__name__": "environment"}
    exec(compile(path.read_text(), path, "exec"), names)
    game = choose(names, None, path.name)()
    assert begun(game.reset({"answer": answer}), 1000) == []  # the row's own prompt
    steps = [moved(game.step(guess), 1000) for guess in guesses]
    return [("".join(content for _, content in step.messages), step.reward, step.done) for step in steps]


@pytest.mark.parametrize("model", [TINY, "own"])
def test_an_environment_is_written_with_its_data(tmp_path: Path, model: str) -> None:
    given = TINY if model == TINY else str(own_files(tmp_path)[0])
    result = CliRunner().invoke(build_app(["init"]), ["init", str(tmp_path / "new"), "--environment", "--model", given])
    assert result.exit_code == 0, result.output
    assert "polyreme environment test" in result.stdout
    config = load_config(tmp_path / "new" / "run.yaml")
    assert findings(config).errors == () and not (tmp_path / "new" / "reward.py").exists()
    assert config.reward is None and config.environment is not None and config.environment.file is not None
    assert play(config.environment.file, "2", "1", "a guess", "3", " 2") == [
        ("higher", 0.0, False),
        ("Answer with a number.", 0.0, False),
        ("lower", 0.0, False),
        ("", 1.0, True),
    ]
    for source in config.prompt_data:
        assert {row.fields["answer"] for row in read_objects(source)} == set("123")
    assert bool(config.trainer.sft) is (model == TINY)


def test_the_warm_start_of_an_environment_is_sometimes_right() -> None:
    """A policy learns only from groups with better and worse episodes."""
    found = sample_environment.conversations(400, 3)
    assert found == sample_environment.conversations(400, 3) != sample_environment.conversations(400, 4)
    episodes = [row["messages"] for row in found]
    assert all(episode[-1]["role"] == "assistant" and len(episode) <= 2 * sample_environment.TURNS for episode in episodes)
    secrets = [row["answer"] for row in sample_environment.tasks(400, 3)]
    right = [episode[-1]["content"] == secret for episode, secret in zip(episodes, secrets, strict=True)]
    assert 0.4 < sum(right) / len(right) < 0.8


@pytest.mark.parametrize("option", ["--data", "--data-config", "--reward", "--prompt-key", "--label-key"])
def test_an_environment_has_its_own_data_and_rewards(tmp_path: Path, option: str) -> None:
    words = ["init", str(tmp_path / "new"), "--environment", option, "sample"]
    refused = CliRunner().invoke(build_app(["init"]), words).exception
    assert isinstance(refused, ConfigError) and option in refused.expected
    assert not (tmp_path / "new").exists()
