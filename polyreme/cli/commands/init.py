"""`polyreme init`: writes the files of a first run.

Invariant: it asks no question that a flag answers. Without a terminal it asks nothing and uses defaults. No file is overwritten.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Annotated, get_args

import typer

from polyreme.cli.new_run.files import REWARDS, SAMPLE, TINY, Answers, Device, find_columns, write_new_run
from polyreme.config.base import NAME
from polyreme.config.named_input import MODEL, TRAINING, split_name
from polyreme.errors import ConfigError
from polyreme.hub.resolve import resolve_path
from polyreme.terminal.completion import one_of

_TRIES = 5
_RANDOM_WEIGHTS = """\
note     The tiny model has random weights and a context of 256 characters. This
         run shows that all parts work. To get a useful policy from your data,
         set model.path to a model of yours."""
_NO_ANSWERS = """\
         It cannot learn from this data: no row has a reference answer, in the
         column {label}, that its context holds with the prompt."""
_NOT_IN_NAME = re.compile(r"[^a-z0-9-]+")


def init(
    folder: Annotated[Path, typer.Argument(help="Folder for the files. Created if needed.")] = Path("."),
    name: Annotated[str | None, typer.Option(help="Name of the run. Default: the folder's.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help=f"Hugging Face directory or name, or `{TINY}`: a small model with random weights, to try a run."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help=f"Data file with one row per prompt, name of a data set, or `{SAMPLE}`: sample data.")
    ] = None,
    data_config: Annotated[str | None, typer.Option(help="Configuration (subset) of a data set that is named.")] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help=f"Reward of a response: {', '.join(REWARDS)}, or a Python file with a function of yours.",
            autocompletion=one_of(REWARDS),
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or npu.", autocompletion=one_of(get_args(Device)))] = None,
    prompt_key: Annotated[
        str | None, typer.Option(help="Column of the data with the prompt. Default: the first usual name that the file has.")
    ] = None,
    label_key: Annotated[
        str | None,
        typer.Option(help="Column of the data with the reference answer. Default: the first usual name that the file has."),
    ] = None,
    environment: Annotated[
        bool,
        typer.Option("--environment", help="Write an environment of several turns with its data, in place of data and reward."),
    ] = False,
) -> None:
    """Write the files of a first run: run.yaml, a reward or environment, sample data. Ask five questions, or none with flags."""
    if environment:
        options = {"data": data, "data-config": data_config, "reward": reward, "prompt-key": prompt_key, "label-key": label_key}
        _check_alone("--environment", [f"--{key}" for key, value in options.items() if value is not None])
        data, reward = SAMPLE, "python"  # no question: the environment has its own data and gives the rewards
    usual = _NOT_IN_NAME.sub("-", folder.resolve().name.lower()).strip("-") or "run"
    answers_name = name or _ask("Name of the run", usual, re.compile(NAME).match, "lower-case letters, digits and hyphens")
    answers_model = _at_home(
        model
        or _ask(
            f"Model: a Hugging Face directory, or `{TINY}` to try without one", TINY, _is_model, "a directory with config.json"
        )
    )
    answers_data = _at_home(
        data or _ask(f"Data: a file with one row per prompt, or `{SAMPLE}`", SAMPLE, _is_data, "a file or directory that exists")
    )
    devices = get_args(Device)
    answers_reward = _at_home(
        reward
        or _ask(f"Reward: {', '.join(REWARDS)}, or a Python file", "python", _is_reward, "one of these, or a file that exists")
    )
    if not _is_reward(answers_reward):
        raise ConfigError(
            f"--reward as one of {', '.join(REWARDS)}, or a Python file that exists", repr(answers_reward), "Choose one of these."
        )
    answers_device = _one_of(
        "--device", device or _ask("Device: cpu, cuda or npu", "cpu", devices.__contains__, "one of these"), devices
    )
    sample = answers_data == SAMPLE
    model_files = resolve_path(Path(answers_model), MODEL, "--model")
    data_files = resolve_path(Path(answers_data), TRAINING, "--data", data_config)
    columns = ("prompt", "answer") if sample else find_columns(data_files, prompt_key, label_key, answers_reward)
    answers = Answers(
        name=answers_name,
        model=str(model_files),
        data=str(data_files),
        reward=answers_reward,
        device=answers_device,  # type: ignore[arg-type]  # _one_of has checked it
        prompt_key=columns[0],
        label_key=columns[1],
        model_name=None if model_files == Path(answers_model) else answers_model,
        data_name=None if data_files == Path(answers_data) else answers_data,
        data_config=data_config,
        environment=environment,
    )
    for path in write_new_run(folder, answers):
        print(f"wrote    {path}")
    if answers_model == TINY and not sample:
        print(_RANDOM_WEIGHTS)
        if not (folder / "sft.jsonl").exists():
            print(_NO_ANSWERS.format(label=answers.label_key))
    print("\n".join(next_steps(folder, environment)))


def next_steps(folder: Path, environment: bool = False) -> list[str]:
    """The commands that a new user runs next."""
    config = quote(str(folder / "run.yaml"))
    return [
        f"next     polyreme config check {config}   # check everything before a start",
        *([f"         polyreme environment test {config}   # play an episode"] if environment else []),
        f"         polyreme up {config}             # train",
    ]


def _check_alone(option: str, others: list[str]) -> None:
    """Raises ConfigError if options were given that have no meaning with this one."""
    if others:
        raise ConfigError(
            f"{option} without {', '.join(others)}",
            "both",
            "Leave out one side: the environment comes with its own data and gives the rewards.",
        )


def _ask(question: str, default: str, fits: Callable[[str], object], wanted: str) -> str:
    """Asks a question, up to _TRIES times until the answer fits. The caller reports a last answer that does not fit."""
    if not sys.stdin.isatty():
        return default
    for _ in range(_TRIES):
        if fits(answer := str(typer.prompt(question, default=default)).strip()):
            break
        print(f"  expected {wanted}; found {answer!r}")
    return answer


def _is_model(answer: str) -> bool:
    return answer == TINY or Path(_at_home(answer), "config.json").is_file() or split_name(answer) is not None


def _is_data(answer: str) -> bool:
    return answer == SAMPLE or Path(_at_home(answer)).exists() or split_name(answer) is not None


def _is_reward(answer: str) -> bool:
    return answer in REWARDS or (answer.endswith(".py") and Path(_at_home(answer)).is_file())


def _at_home(path: str) -> str:
    return os.path.expanduser(path)


def _one_of(option: str, answer: str, choices: tuple[str, ...]) -> str:
    if answer not in choices:
        raise ConfigError(f"{option} as one of {', '.join(choices)}", repr(answer), "Choose one of these.")
    return answer
