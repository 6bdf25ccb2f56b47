"""Finds the training command among the commands of a script, and reads its options.

Invariant: every option of the command is in the values, among what stays open, or in the notes.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import yaml

from polyreme.errors import ConfigError
from polyreme.import_config.reading.shell import Call
from polyreme.import_config.reading.shell_words import is_open, known_part, shown

_HYDRA = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w-]*(?:[./@][\w@.-]+)*)(?:=(.*))?", re.DOTALL)
_TRAINS = re.compile(
    r"main_ppo|main_dapo|train_ppo|train_grpo|grpo|rloo|ppo|dapo|gspo|recipe\.|verl\.|openrlhf\.|mindspeed", re.IGNORECASE
)
_LAUNCHER = re.compile(r".*\.(distributed|commands)\.(run|launch)|accelerate\.commands.*|deepspeed.*")
_COUNTS = {"num_processes", "nproc_per_node", "num_gpus", "nnodes", "num_nodes"}
"""Options of launchers that say how many processes there are."""
_TIME = re.compile(r"[-+]?\d+(:\d+)+")
_CONFIGURATION = re.compile(r"[^-=\s][^=\s]*\.(ya?ml|json)")
_ALGORITHM = re.compile(r"ppo|grpo|rloo|dapo|gspo")
_AROUND = re.compile(r"eval|convert|merge|prepare|preprocess|serve|generate")
_STAGES = {
    r"sft|continue_pretrain": "polyreme sft",
    r"train_rm|train_prm|reward_trainer|trl reward|reward_modeling": "polyreme reward-model",
    r"dpo|kto|orpo|cpo|simpo|ipo": "polyreme dpo",
}
_OTHER = re.compile(
    r"sft|train_rm|train_prm|dpo|kto|orpo|reward|serve_rm|preprocess|convert|merge|eval|generat|knowledge|pretrain|vllm"
)


@dataclass
class Launch:
    """A training command.

    Attributes:
        program: the module or file, such as `verl.trainer.main_ppo`.
        processes: number of processes of the launcher; None: it names none.
        config_file: the launcher's own configuration, such as that of accelerate.
        values: options by name.
        opened: options whose value the script leaves open, with their text.
        notes: what else must be said, each with the words that it is about.
    """

    program: str
    processes: int | None = None
    config_file: str | None = None
    values: dict[str, object] = field(default_factory=dict)
    opened: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)


def find(calls: Iterable[Call], where: str) -> Launch | None:
    """The training command of a script. None: no command has options.

    Raises:
        ConfigError: the script starts another kind of training, which is a stage here.
    """
    every = list(calls)
    stray = [call.words for call in every if call.words and _is_option(call.words[0])]
    found = [(call, launch) for call in every if (launch := _launch(call.words)) is not None]
    training = [each for each in found if _is_training(each[1].program)]
    if not training:
        _refuse_stages([launch.program for _, launch in found], where)
        training = [max(found, key=lambda each: len(each[1].values))] if found else []
    if not training:
        return None
    (call, chosen), *others = sorted(training, key=lambda each: not each[0].certain)
    chosen.notes += [
        (
            _short(words),
            "outside the training command, which ended before (a comment, or no backslash): the original does not read it",
        )
        for words in stray
    ]
    others = [each for each in others if each[1].values != chosen.values]
    if others:
        count = len(others) + 1
        chosen.notes.append(
            (chosen.program, f"the script has {count} training commands with different options: one of them is read")
        )
    if not call.certain:
        chosen.notes.append((chosen.program, "a condition that the script leaves open decides whether this command runs"))
    return chosen


def _is_training(program: str) -> bool:
    """Whether the name of a program is that of reinforcement learning."""
    last = re.split(r"[/.]", program.removesuffix(".py"))[-1]
    if _ALGORITHM.search(last) and not _AROUND.match(last):
        return True
    return _TRAINS.search(program) is not None and _OTHER.search(program) is None


def _is_option(word: str) -> bool:
    match = _HYDRA.fullmatch(word)
    return word.startswith("--") or (match is not None and "." in match[2] and match[3] is not None)


def _short(words: Sequence[str]) -> str:
    text = shown(" ".join(words))
    return text if len(text) <= 100 else f"{text[:97]}..."


def _refuse_stages(programs: Sequence[str], where: str) -> None:
    for program in programs:
        for pattern, command in _STAGES.items():
            if re.search(pattern, program.lower()):
                raise ConfigError(
                    f"a command of reinforcement learning in {where}",
                    program,
                    f"This kind of training is `{command}` (docs/stages.md), whose configuration is written by hand.",
                )


def _launch(words: Sequence[str]) -> Launch | None:
    """The program and its options; None: the words start no program with options."""
    words = list(words)
    if "submit" in words and "--" in words:  # ray job submit ... -- COMMAND
        words = words[words.index("--") + 1 :]
    start = None if words[:1] in (["echo"], ["printf"]) else _program(words)
    if start is None:
        return None
    program, before, arguments = " ".join(words[start[0] : start[1]]), words[: start[0]], words[start[1] :]
    options = _launcher(before)
    file = None if _COUNTS & options.opened.keys() else options.values.get("config_file")
    launch = Launch(shown(program), _processes(options), file if isinstance(file, str) else None)
    _read_options(arguments, launch)
    return launch if launch.values or launch.opened else None


def _program(words: Sequence[str]) -> tuple[int, int] | None:
    """Start and end of the program's name among the words."""
    for place, word in enumerate(words):
        if word in ("-m", "--module") and place + 1 < len(words):
            if _LAUNCHER.fullmatch(words[place + 1]):  # such as torch.distributed.run: the program comes later
                continue
            return place + 1, place + 2
        if (
            word.rpartition("/")[2] == "trl"
            and place + 1 < len(words)
            and words[place + 1].isalpha()
            and words[place + 1] != "trl"
        ):
            return place, place + 2
        if word.endswith(".py") and not word.startswith("-"):
            return place, place + 1
        if re.match(r"(openrlhf|verl)\.\w", word) and "=" not in word:
            return place, place + 1
    if words and not words[0].startswith("-") and sum(word.startswith("--") or "=" in word for word in words) > 3:
        return 0, 1
    return None


def _launcher(words: Sequence[str]) -> Launch:
    """The options of torchrun, accelerate or deepspeed."""
    options = Launch("")
    _read_options([re.sub("^--[a-z-]+", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in words], options)
    return options


def _processes(launcher: Launch) -> int | None:
    """Processes that a launcher starts, over all machines. None: it does not say, or leaves a part of it open."""
    options = launcher.values
    each = options.get("nproc_per_node", options.get("num_gpus"))
    nodes = options.get("nnodes", options.get("num_nodes", 1))
    total = options.get("num_processes")
    if isinstance(total, int):
        return total
    if not isinstance(each, int) or not isinstance(nodes, int) or _COUNTS & launcher.opened.keys():
        return None
    return each * nodes


def _read_options(words: Sequence[str], launch: Launch) -> None:
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            end = place
            while not equals and end < len(words) and not _is_option(shown(words[end])):
                end += 1
            _set(launch, key, value if equals else list(words[place:end]))
            place = end if not equals else place
        elif (match := _HYDRA.fullmatch(word)) and match[3] is not None and match[1] != "~":
            _set(launch, match[2], match[3])
        elif _CONFIGURATION.fullmatch(word) and "config" not in launch.values:
            launch.values["config"] = word
        elif match and match[1] == "~":
            launch.values.pop(match[2], None)
            launch.opened.pop(match[2], None)
        elif is_open(word) and known_part(word).strip() == "":
            launch.notes.append((_short([word]), "CHECK: words of the command that the script leaves open"))


def _set(launch: Launch, key: str, given: str | list[str]) -> None:
    """Sets an option. A name or value with an open part is not a value."""
    parts = given if isinstance(given, list) else [given]
    launch.values = {name: value for name, value in launch.values.items() if name != key and not name.startswith(f"{key}.")}
    launch.opened.pop(key, None)
    if is_open(key):
        launch.notes.append((shown(key), "CHECK: an option whose name the script leaves open"))
    elif any(is_open(part) for part in parts):
        launch.opened[key] = shown(" ".join(parts))
    elif isinstance(given, list):
        values = [value_of(part) for part in parts]
        launch.values[key] = True if not values else values[0] if len(values) == 1 else values
    else:
        launch.values[key] = value_of(given)


def value_of(text: str) -> object:
    """The value that a text has in YAML; the text itself if it is no YAML."""
    if _TIME.fullmatch(text):  # such as 1:4, which YAML reads as 64
        return text
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # a ValueError: a date such as 2024-13-01
        return text
    if isinstance(value, dict) and (None in value.values() or not text.lstrip().startswith("{")):  # {placeholder}, or "User: {}"
        return text
    return text if value is None and text not in ("null", "~", "") else value
