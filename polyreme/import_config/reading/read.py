"""Reads configuration files of other systems: YAML, JSON, and shell scripts with a command line.

Invariant: the result has the file's plain values by dotted key. What the file leaves open is `Unresolved`. Nothing is executed. A
configuration of a system recognised but not imported is refused with what to do instead, and never read as another system's.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from polyreme.config.yaml_text import load_yaml
from polyreme.errors import ConfigError
from polyreme.import_config.reading.launch import Launch, find, value_of
from polyreme.import_config.reading.shell import calls
from polyreme.import_config.rules import Unresolved, flatten

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_PRIME_RL = re.compile(r"^[^#\n]*\b(rl|trainer|orchestrator|inference)\s+@\s*\S+\.toml", re.MULTILINE)
_MAX_BYTES = 4 << 20
_MAX_REFERENCES = 16
_DO = "Name a YAML file, a JSON file, a shell script or a Python script of TRL."

_DEEPSPEED_PPO = (
    "Polyreme has its algorithm, PPO with a critic and a reward model: write the run with `polyreme init` and algorithm.preset: "
    "ppo. actor_learning_rate is trainer.optimizer.lr, critic_learning_rate trainer.critic.optimizer.lr, max_prompt_seq_len "
    "data.max_prompt_tokens, max_answer_seq_len rollout.max_new_tokens, ppo_epochs algorithm.epochs, unsup_coef "
    "algorithm.ptx.coef (with enable_unsupervised); its code has a KL of 0.1 in the reward, scores within 5, lam 0.95, and "
    "clips of 0.2."
)
_OPD = (
    "Polyreme has distillation by a policy gradient: write the run with `polyreme init`, algorithm.preset: distillation and a "
    "section `teacher` (docs/algorithms.md#distillation). That is --opd.topk 0 with the estimator k1; the KL over the top k "
    "tokens and the other estimators have no counterpart."
)
_PRIME = (
    "Write the run with `polyreme init`: groups_per_iteration is orchestrator.batch_size / its group size (group_size, "
    "rollouts_per_example), max_staleness its max_async_level, iterations max_steps. Its environments (verifiers) become a "
    "reward (docs/rewards.md), or with several turns an environment.file (docs/environments.md); choose algorithm.preset "
    "yourself, since its loss depends on the version."
)


@dataclass
class Read:
    """What a file says.

    Attributes:
        values: values by dotted key. A value that the file leaves open is `Unresolved`: `$train_files`, `${WORK_DIR}/reward.py`.
        notes: what else must be said about the file, each with the words that it is about.
        program: module or file of a script's training command.
    """

    values: dict[str, object]
    notes: list[tuple[str, str]] = field(default_factory=list)
    program: str = ""


def read_file(path: Path) -> Read:
    """Reads a file.

    Raises:
        ConfigError: the file is missing, too large, or neither YAML, JSON nor a script with options.
    """
    text = text_of_file(path)
    if path.suffix == ".toml":
        raise _toml(text, path)
    read = _read_tree(text, path) if path.suffix in (".yaml", ".yml", ".json") else _read_script(text, path)
    _resolve(read)
    if not set(read.values) - {"config-name", "config-path", "num_processes"}:
        raise ConfigError(f"options in {path}", "; ".join(f"{words}: {why}" for words, why in read.notes) or "none", _DO)
    return read


def text_of_file(path: Path) -> str:
    """The text of a file. Raises ConfigError for one that is missing, too large or no text."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"a configuration of at most {_MAX_BYTES >> 20} MiB at {path}", f"{path.stat().st_size} bytes", _DO)
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"a configuration at {path}", str(error), _DO) from None


def _read_tree(text: str, path: Path) -> Read:
    try:
        tree = load_yaml(text, str(path))  # JSON is YAML
    except yaml.YAMLError as error:
        raise ConfigError(f"YAML or JSON in {path}", str(error).replace("\n", " "), "Fix the file.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"a mapping of keys in {path}", type(tree).__name__, "Name a configuration file.")
    return Read({key: _plain(value) for key, value in flatten(tree)})


def _toml(text: str, path: Path) -> ConfigError:
    try:
        return refuse_toml(tomllib.loads(text), str(path))
    except tomllib.TOMLDecodeError as error:
        return ConfigError(f"TOML in {path}", str(error), _DO)


def _read_script(text: str, path: Path) -> Read:
    try:
        launch = find(calls(text.replace("\r\n", "\n")), str(path))
    except RecursionError:
        raise ConfigError(f"a shell script in {path}", "brackets nested too deeply", _DO) from None
    if launch is None:
        if _PRIME_RL.search(text):
            raise refuse_prime_rl(str(path))
        return Read({})
    values = {**_options(launch), **{key: Unresolved(text) for key, text in launch.opened.items()}}
    processes = launch.processes if launch.processes is not None else _processes_of(launch.config_file, path)
    # Keys with dots are hydra's, or OpenRLHF's, which count devices themselves.
    dotted = any("." in key for key in (*launch.values, *launch.opened))
    if processes is not None and "num_processes" not in values and not dotted:
        values["num_processes"] = processes
    return Read(values, _with_config(values, path) + launch.notes, launch.program)


def _options(launch: Launch) -> Mapping[str, object]:
    return {key: _plain(value) for name, given in launch.values.items() for key, value in flatten(given, name)}


def _with_config(values: dict[str, object], path: Path) -> list[tuple[str, str]]:
    """Adds values of the YAML file of `--config` or hydra's `--config-name`. The command line wins. Returns what must be said."""
    named, file = values.pop("config", None), None
    if isinstance(named, str):
        file = _find(named, path)
    elif isinstance(hydra := values.get("config-name"), str):
        named = f"{hydra.removesuffix('.yaml')}.yaml"
        file = (
            _find(named, path)
            or _find(f"{values.get('config-path', 'configs')}/{named}", path)
            or _find(f"configs/{named}", path)
        )
        if file is None and set(values) - {"config-name", "config-path"}:
            return []  # it is part of the other system, whose defaults are known here
    if not isinstance(named, str):
        return []
    if file is None:
        return [
            (
                f"--config {named}",
                f"this file is not here, so its options are missing; copy it beside {path.name} and import again",
            )
        ]
    values.pop("config-name", None)
    of_file = _read_tree(text_of_file(file), file).values
    values.update({key: value for key, value in of_file.items() if key not in values})
    return []


def _processes_of(named: str | None, path: Path) -> int | None:
    """The number of processes in a launcher's own configuration, if that is here."""
    file = None if named is None else _find(named, path)
    count = None if file is None else _read_tree(text_of_file(file), file).values.get("num_processes")
    return count if isinstance(count, int) else None


def _find(named: str, path: Path) -> Path | None:
    """A configuration that a script names: in the working directory, or in one of the directories that contain the script."""
    files = (Path(named), *(parent / named for parent in path.resolve().parents))
    return next((file for file in files if file.suffix in (".yaml", ".yml", ".json") and file.is_file()), None)


def _plain(value: object) -> object:
    """Numbers such as 1e-6, which YAML 1.1 reads as text, as numbers; dates as text; the same within lists."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return float(value) if _NUMBER.fullmatch(value) else value
    return value if value is None or isinstance(value, bool | int | float | dict) else str(value)


def _resolve(read: Read) -> None:
    """Replaces hydra's references to other keys by their values. A reference without a value leaves the key open."""
    for key, value in list(read.values.items()):
        if value == "???":  # hydra: must be set elsewhere
            del read.values[key]
        elif isinstance(value, str) and not isinstance(value, Unresolved) and _REFERENCE.search(value):
            found = _referred(value, key, read)
            read.values[key] = Unresolved(value) if found is None else found[0]


def _referred(value: Any, key: str, read: Read) -> tuple[Any] | None:
    """The value without references, in a tuple; None: a reference has no value."""
    for _ in range(_MAX_REFERENCES):
        if isinstance(value, Unresolved):
            return None
        match = _REFERENCE.search(value) if isinstance(value, str) else None
        if match is None:
            return (value,)
        found = _reference(match[1].strip(), key, read)
        if found is None:
            return None
        value = found[0] if match[0] == value else value[: match.start()] + str(found[0]) + value[match.end() :]
    return None


def _reference(text: str, key: str, read: Read) -> tuple[object] | None:
    resolver, colon, arguments = text.partition(":")
    if colon and resolver in ("oc.select", "oc.env"):
        name, comma, default = arguments.partition(",")
        if resolver == "oc.env":
            return ("~",) if name == "HOME" else (value_of(default.strip()),) if comma else None
        return (read.values[name.strip()],) if name.strip() in read.values else (value_of(default.strip()),)
    if colon or not text:
        return None
    dots = len(text) - len(text.lstrip("."))
    parents = key.split(".")[:-dots] if dots else []
    name = ".".join([*parents, text.lstrip(".")])
    if name in read.values:
        return (read.values[name],)
    below = {other: each for other, each in read.values.items() if other.startswith(f"{name}.")}
    return (None,) if below else None


def refuse(values: Mapping[str, object], program: str, where: str) -> None:
    """Raises ConfigError for the command line of DeepSpeed-Chat or of OpenRLHF's `train_opd`."""
    if "train_opd" in program:
        raise _error(where, "OpenRLHF's train_opd, on-policy distillation", _OPD)
    keys = {key.replace("-", "_") for key in values}
    if "actor_model_name_or_path" in keys and keys & {"actor_zero_stage", "actor_learning_rate", "max_answer_seq_len"}:
        raise _error(where, "DeepSpeed-Chat, step 3 (PPO)", _DEEPSPEED_PPO)
    if {"data_path", "data_split", "model_name_or_path"} <= keys:
        stage = "`polyreme reward-model`" if "num_padding_at_beginning" in keys else "`polyreme sft`"
        raise _error(where, "DeepSpeed-Chat, step 1 or 2", f"This training is a stage: {stage} (docs/stages.md).")


def refuse_toml(tree: Mapping[str, object], where: str) -> ConfigError:
    """The error for a TOML file."""
    if tree.keys() & {"orchestrator", "inference"} or tree.keys() >= {"batch_size", "seq_len"} or "trainer" in tree:
        return _error(where, "prime-rl", _PRIME)
    return ConfigError(
        f"YAML, JSON, a shell script or a script of TRL at {where}", "TOML", "No system with TOML files can be imported."
    )


def refuse_prime_rl(where: str) -> ConfigError:
    """The error for a script that starts prime-rl."""
    return _error(where, "prime-rl", _PRIME)


def _error(where: str, system: str, what: str) -> ConfigError:
    return ConfigError(
        f"a configuration of verl, MindSpeed RL, TRL, OpenRLHF or PaddleNLP in {where}",
        f"one of {system}, which is not imported",
        what,
    )
