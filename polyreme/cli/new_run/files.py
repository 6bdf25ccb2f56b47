"""The files of a new run, from the answers to five questions.

Invariant: no file is overwritten, and `polyreme config check` accepts what is written, for every combination of answers whose
model and data exist.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import yaml

from polyreme.cli.new_run import sample_environment
from polyreme.cli.new_run.sample_data import rows, supervised_rows
from polyreme.config.base import NAME
from polyreme.config.data import DataSource
from polyreme.dataset.chat import plain_prompt, read_prompt
from polyreme.dataset.columns import column_names, label_text, value_at
from polyreme.dataset.source import read_objects
from polyreme.dataset.text_files import Row
from polyreme.errors import ConfigError, DataError
from polyreme.hub.tiny_model import write_tiny_model
from polyreme.rundir.run_directory import make_folder

TINY = "tiny"
"""The model that is created for a first try."""
SAMPLE = "sample"
"""The data that is created for a first try."""
REWARDS = {
    "python": "a function in reward.py",
    "exact": "1 if the response is the label",
    "numeric": "1 if the number in the response is the label's",
    "math": "1 if the response is mathematically equal to the label",
    "choice": "1 if the chosen letter is the label's",
}
_NEED_LABEL = REWARDS.keys() - {"python"}
Device = Literal["cpu", "cuda", "npu"]
_PROMPTS = ("prompt", "question", "problem", "instruction", "input", "query", "messages", "src")
_LABELS = (
    *("answer", "label", "solution", "ground_truth", "final_answer", "target", "output", "tgt"),
    "reward_model.ground_truth",  # verl's
)
_HELD_OUT = 0.05
"""Share of the user's prompts that are held out."""
_HELD_OUT_EPISODES = 30
_SUPERVISED = 1600
"""Maximum number of supervised rows for the tiny model."""
_TINY_TOKENS = 128
"""Maximum tokens of a prompt and of a response of the tiny model, whose tokens are characters."""
_TOKENS = 512
"""Maximum tokens of a prompt and of a response, unless the model's context is shorter."""


@dataclass(frozen=True)
class Answers:
    """The answers to the questions.

    Attributes:
        name: name of the run.
        model: a Hugging Face directory, or TINY.
        data: a data file, or SAMPLE.
        reward: a key of REWARDS, or the path of a Python file with a reward function.
        device: device type of learner and replicas.
        prompt_key, label_key: columns of the data file.
        model_name, data_name, data_config: names for run.yaml, when `model` and `data` are the files of repositories.
        environment: whether a sample environment plays the sample data. It gives the rewards.
    """

    name: str
    model: str = TINY
    data: str = SAMPLE
    reward: str = "python"
    device: Device = "cpu"
    prompt_key: str = "prompt"
    label_key: str = "answer"
    model_name: str | None = None
    data_name: str | None = None
    data_config: str | None = None
    environment: bool = False


def write_new_run(folder: Path, answers: Answers) -> list[Path]:
    """Writes the files into the folder, which is created if needed. Returns them in reading order.

    Raises:
        ConfigError: the name is not a valid run name, a file exists, or the named model or data does not exist.
    """
    if not re.match(NAME, answers.name):
        raise ConfigError("a name of lower-case letters, digits and hyphens", repr(answers.name), "Choose such a name: --name.")
    texts = {"run.yaml": run_yaml(answers)} | (_environment(answers) if answers.environment else _reward_and_data(answers))
    written = [folder / name for name in texts]
    created = [*written, folder / "model"] if answers.model == TINY else written
    if there := [path.name for path in created if path.exists()]:
        raise ConfigError(f"no {' and no '.join(there)} in {folder}", "files of another run", "Choose another folder.")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"a folder for the files at {folder}", "a file", "Choose another folder; --data names your data.")
    make_folder(folder, "FOLDER")
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    if answers.model == TINY:
        write_tiny_model(folder / "model")
    return created


def _environment(answers: Answers) -> dict[str, str]:
    """The texts of the sample environment and its data, by file name."""
    texts = {
        "environment.py": sample_environment.source(),
        "train.jsonl": _lines(sample_environment.tasks(512, 1)),
        "eval.jsonl": _lines(sample_environment.tasks(_HELD_OUT_EPISODES, 2)),
    }
    if answers.model == TINY:
        texts["sft.jsonl"] = _lines(sample_environment.conversations(_SUPERVISED, 3))
    return texts


def _reward_and_data(answers: Answers) -> dict[str, str]:
    """The texts of the reward and the sample data that are asked for, by file name."""
    texts = {}
    if answers.reward == "python":
        texts["reward.py"] = _REWARD if answers.data == SAMPLE else _EMPTY_REWARD
    if answers.data == SAMPLE:
        train = rows(answers.reward, 512, 1)
        texts |= {"train.jsonl": _lines(train), "eval.jsonl": _lines(rows(answers.reward, 64, 2, train))}
        if answers.model == TINY:
            texts["sft.jsonl"] = _lines(supervised_rows(answers.reward, _SUPERVISED, 3))
    elif answers.model == TINY and (own := own_supervised_rows(answers)):
        texts["sft.jsonl"] = _lines(own)
    return texts


def run_yaml(answers: Answers) -> str:
    """The text of run.yaml. Raises ConfigError when the model, the data or the reward's file does not exist."""
    tiny, sample = answers.model == TINY, answers.data == SAMPLE
    prompt, response, length = _bounds(answers)
    learns = "the form of an answer" if sample else "to write the reference answers"
    warm_start = (
        f"  # The model starts from random weights: it first learns {learns}, then what is right.\n"
        "  sft:\n    - {data: sft.jsonl, steps: 50, batch_size: 32, lr: 2.0e-3, warmup: 5}\n"
    )
    return _RUN.format(
        name=_as_yaml(answers.name),
        device=answers.device,
        iterations=60 if tiny else 100,
        eval_interval=10 if tiny else 20,
        groups=16 if tiny else 32,
        model="model" if tiny else answers.model_name or _absolute("the model", answers.model),
        dtype="float32" if answers.device == "cpu" else "bfloat16",
        prompts=_SAMPLE_PROMPTS if sample else _own_prompts(answers),
        answers=_SAMPLED_ANSWERS if tiny and sample else "",
        prompt_key="prompt" if sample else _as_yaml(answers.prompt_key),
        label_key="answer" if sample else _as_yaml(answers.label_key),
        prompt_tokens=prompt,
        new_tokens=response,
        length=length,
        vllm=f"  vllm: {{kv_cache_mib: {64 if tiny else 1024}}}\n" if answers.device == "cpu" else "",
        rewards=sample_environment.SECTION if answers.environment else _reward(answers.reward),
        lr="1.0e-3" if tiny else "1.0e-6",
        sft=warm_start if tiny and (sample or own_supervised_rows(answers)) else "",
    )


def own_supervised_rows(answers: Answers) -> list[dict[str, object]]:
    """Prompts of the user's training part with their reference answers as responses, for the tiny model, which cannot write one
    yet. Rows without such an answer, and those that its context does not hold, are left out."""
    found: list[dict[str, object]] = []
    with suppress(DataError):  # a damaged row, which `config check` reports
        for row in islice(read_objects((_trained_part(answers),)), _SUPERVISED):
            prompt, label = value_at(row.fields, answers.prompt_key), value_at(row.fields, answers.label_key)
            with suppress(DataError, TypeError):  # neither a text nor a chat; a label that is no text
                if (text := label_text(label)) and len(plain_prompt(read_prompt(prompt, row.where))) < _TINY_TOKENS > len(text):
                    found.append({answers.prompt_key: prompt, "response": text})
    return found


def _trained_part(answers: Answers) -> DataSource:
    """The part of the user's prompts that is trained on: all, if the file is too small for two parts."""
    held_out, trained = _split(answers)
    return trained if _has_row(held_out) and _has_row(trained) else DataSource(path=_data(answers))


def _split(answers: Answers) -> list[DataSource]:
    """The held-out part of the user's prompts, then the other one."""
    path = _data(answers)
    return [DataSource(path=path, split=split, split_by=answers.prompt_key) for split in ((0.0, _HELD_OUT), (_HELD_OUT, 1.0))]


def _data(answers: Answers) -> Path:
    """The rows on this machine. The pattern of a repository's files is none to resolve."""
    return Path(answers.data) if answers.data_name else Path(answers.data).resolve()


def _own_prompts(answers: Answers) -> str:
    """The lines of `data` that name the user's file: a part of its prompts is held out if it is large enough for both parts."""
    path, config = answers.data_name or _absolute("the data", answers.data), answers.data_config
    if _trained_part(answers).split is None:
        named = f"  config: {config}\n" if config else ""
        return f"  train: {path}\n{named}  # eval: eval.jsonl               # held-out rows, to see progress\n"
    key = json.dumps(answers.prompt_key, ensure_ascii=False)
    path += f", config: {config}" if config else ""
    return (
        f"  train:\n    - {{path: {path}, split: [{_HELD_OUT}, 1], split_by: {key}}}\n"
        f"  eval:                           # held-out prompts, to see progress\n"
        f"    - {{path: {path}, split: [0, {_HELD_OUT}], split_by: {key}}}\n"
    )


def _has_row(source: DataSource) -> bool:
    try:
        return next(read_objects((source,)), None) is not None
    except DataError:  # no row in this part, or a damaged one, which `config check` reports
        return False


def _reward(answer: str) -> str:
    """The section `reward`, with a comment."""
    if answer in REWARDS:
        source = "file: reward.py" if answer == "python" else f"name: {answer}"
        line = f"{source:<28}# {REWARDS[answer]}"
    else:
        line = f"file: {_absolute('the reward', answer)}"
    return f"reward:\n  rewards:\n    - {line}\n"


def find_columns(path: Path, prompt_key: str | None, label_key: str | None, reward: str) -> tuple[str, str]:
    """The columns with the prompt and reference answer in any data file: those given, or the first usual ones of its first row.

    Raises:
        DataError: the file cannot be read, or has no rows.
        ConfigError: no column has the prompt, or the answer that the reward needs.
    """
    row = next(read_objects(path))
    prompt = _find_column(row, prompt_key, _PROMPTS, "--prompt-key", "the prompt")
    if reward not in _NEED_LABEL and label_key is None:
        return prompt, next((key for key in _LABELS if _has_column(row, key)), "answer")
    return prompt, _find_column(row, label_key, _LABELS, "--label-key", "the reference answer")


def _find_column(row: Row, given: str | None, usual: Sequence[str], option: str, what: str) -> str:
    found = next((key for key in ((given,) if given else usual) if _has_column(row, key)), None)
    if found is None:
        raise ConfigError(
            f"a column with {what}, {given or 'such as ' + ', '.join(usual[:3])}, in {row.where}",
            f"the columns {', '.join(column_names(row.fields))}",
            f"Name it: {option} COLUMN; a dotted path names a value within one.",
        )
    return found


def _has_column(row: Row, key: str) -> bool:
    missing = object()
    return value_at(row.fields, key, missing) is not missing


def _bounds(answers: Answers) -> tuple[int, int, int]:
    """Maximum tokens of a prompt, of an answer, and of a conversation."""
    tiny, sample = answers.model == TINY, answers.data == SAMPLE
    if answers.environment:
        prompt, rest = (64, 64) if tiny else _lengths(answers)
        return prompt, (8 if tiny else rest // (2 * sample_environment.TURNS)), prompt + rest
    prompt, response = (48, 16) if tiny and sample else _lengths(answers)
    return prompt, response, prompt + response


def _lengths(answers: Answers) -> tuple[int, int]:
    """Longest prompt and response in tokens: _TOKENS each, or halves of the model's context."""
    if answers.model == TINY:
        return _TINY_TOKENS, _TINY_TOKENS
    config = Path(answers.model) / "config.json"
    try:
        context = json.loads(config.read_text()).get("max_position_embeddings") or 2 * _TOKENS
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"a Hugging Face model directory at {answers.model}", str(error), "Fix the path of the model."
        ) from None
    return min(_TOKENS, context // 2), min(_TOKENS, context // 2)


def _as_yaml(text: str) -> str:
    """A text as a YAML value, in quotes if needed."""
    try:
        plain = yaml.safe_load(f"key: {text}") == {"key": text}
    except yaml.YAMLError:
        plain = False
    return text if plain else json.dumps(text, ensure_ascii=False)


def _absolute(what: str, path: str) -> str:
    """A path in the form of run.yaml. YAML accepts JSON's quotes."""
    if not Path(path).exists():
        raise ConfigError(f"{what} at {path}", "no such file or directory", "Fix the path.")
    return json.dumps(str(Path(path).resolve()))


def _lines(found: Iterable[Mapping[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in found)


# For a long time, the most likely answer of a tiny model is a single letter, which is right only by chance.
_SAMPLED_ANSWERS = "eval_answers: 4                   # sampled answers of each held-out prompt; 1: the most likely one\n"
_SAMPLE_PROMPTS = "  train: train.jsonl\n  eval: eval.jsonl\n"
_RUN = """\
# Paths are relative to this file. `polyreme config show run.yaml` prints every key with its default and its meaning.
name: {name}
device: {device}
iterations: {iterations}
groups_per_iteration: {groups}          # prompts in each iteration
group_size: 8                     # samples of each prompt
eval_interval: {eval_interval}                 # iterations between evaluations on held-out prompts
{answers}
model:
  path: {model}
  dtype: {dtype}

data:
{prompts}  prompt_key: {prompt_key}              # column with the prompt, a text or chat messages
  label_key: {label_key}               # column with the reference answer
  max_prompt_tokens: {prompt_tokens}

{rewards}
rollout:
  max_new_tokens: {new_tokens}
  max_model_len: {length}
{vllm}
algorithm:
  preset: grpo

trainer:
  optimizer: {{lr: {lr}}}
  save_minutes: 10                # a run that is killed repeats about these minutes of training
{sft}"""

_REWARD = '''\
def reward(response, label):
    """The fraction of the first four characters that are in the label."""
    return sum(letter in label for letter in response[:4]) / 4
'''
_EMPTY_REWARD = '''\
def reward(prompt, response, label):
    """A number: the higher, the better. `label` is the row's reference answer, or an empty text."""
    return float(bool(label) and label in response)
'''
