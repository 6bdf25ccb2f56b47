"""The systems whose configurations can be imported, and the recognition of a file's system.

Invariant: a file is imported by exactly one system: the named one, or the one whose keys it has.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from polyreme.errors import ConfigError
from polyreme.import_config.application import Entry, Imported, apply, known_values
from polyreme.import_config.environments import play
from polyreme.import_config.mindspeed import MINDSPEED, with_inherited
from polyreme.import_config.openrlhf import OPENRLHF
from polyreme.import_config.openrlhf_names import with_dotted_names
from polyreme.import_config.paddlenlp import PADDLENLP
from polyreme.import_config.reading.read import read_file, refuse
from polyreme.import_config.rules import ITERATIONS, Fate, System, Values
from polyreme.import_config.scripts.trainer import read_script
from polyreme.import_config.trl import TRL, refuse_others, trainer_of, with_plain_options
from polyreme.import_config.trl_batches import TRAINER
from polyreme.import_config.verl.system import VERL, with_older_names

SYSTEMS: dict[str, System] = {system.name: system for system in (VERL, MINDSPEED, TRL, OPENRLHF, PADDLENLP)}
_PREPARED = {
    VERL.name: with_older_names,
    MINDSPEED.name: with_inherited,
    OPENRLHF.name: with_dotted_names,
    TRL.name: with_plain_options,
}
"""For systems with several spellings of a key: a function that returns the values under the keys of the rules."""
_TRAINERS = {VERL.name: r"main_(ppo(_\w+)?|dapo)|fully_async_main", OPENRLHF.name: r"train_ppo(_ray\w*)?"}
"""The names of the programs whose training the rules of a system describe. A recipe often has a loss of its own behind the same
options."""
_REQUIRED = {"model.path": "FILL_IN/model", "data.train": "FILL_IN/data"}
"""What a run needs and a configuration may leave to its script, with a path for the user to replace: without it no run starts."""
_PLACEHOLDER = 100
"""Iterations of a run whose file has a number of passes over data of unknown length."""


def import_file(path: Path, name: str | None = None, rows: int | None = None) -> tuple[System, Imported]:
    """Imports the values of another system's configuration.

    Args:
        name: the system; None: recognised by the keys.
        rows: number of rows of the training data, for a file with a number of passes and no number of steps.

    Raises:
        ConfigError: the file is not a configuration, or its system is unknown.
    """
    program = path.suffix == ".py"
    if program and name not in (None, TRL.name):
        raise ConfigError(f"YAML, JSON or a shell script of {name} at {path}", "a Python script", "Only scripts of TRL are read.")
    read = read_script(path) if program else read_file(path)
    values: Values = read.values
    if name is None:
        refuse(values, read.program, str(path))
    system = SYSTEMS[name] if name else TRL if program else recognise(values, path)
    values = prepared(system, values)
    if system is TRL:
        refuse_others(values)
        trainer = trainer_of(f"{read.program} {path.name}")
        values = {**values, TRAINER: trainer} if trainer else values
    found = translate(system, values, rows)
    notes = [*_own_trainer(system, read.program), *read.notes]
    found.lost[:0] = [Entry(words, None, "", None, why, Fate.LOST) for words, why in notes]
    return system, found


def _own_trainer(system: System, program: str) -> Iterator[tuple[str, str]]:
    known, name = _TRAINERS.get(system.name), re.split(r"[/.]", program.removesuffix(".py"))[-1]
    if known and program and not re.fullmatch(known, name):
        yield program, f"a trainer of its own, which may train otherwise than {system.title}'s; only its options were read"


def translate(system: System, values: Values, rows: int | None = None) -> Imported:
    """The import of values under the keys of the system's rules. Raises ConfigError as `apply` does."""
    found = apply(system, values)  # the first time, for the number of iterations, of which other keys are a part
    count, comment = _iterations(found, system, known_values(system, values), rows)
    found = apply(system, {**values, ITERATIONS: count})
    if "iterations" not in found.values:
        found.values["iterations"], found.comments["iterations"] = count, comment
    for key, file in _REQUIRED.items():
        if key not in found.values:
            found.values[key], found.comments[key] = file, f"CHECK: the file does not name {file.removeprefix('FILL_IN/')}"
    play(found, system.environment(known_values(system, values)))
    return found


def prepared(system: System, values: Values) -> Values:
    """The values under the keys of the system's rules."""
    return _PREPARED[system.name](values) if system.name in _PREPARED else values


def recognise(values: Values, path: Path) -> System:
    """The system that has most of the values' keys. Raises ConfigError when it has fewer than half of them."""
    known = {name: sum(bool(system.rules_of(key)) for key in prepared(system, values)) for name, system in SYSTEMS.items()}
    best = max(known, key=lambda name: known[name])
    if 2 * known[best] < len(values):
        raise ConfigError(
            f"a configuration of {', '.join(SYSTEMS)} in {path}",
            f"{known[best]} of {len(values)} keys of {best}",
            "Name the system with --system.",
        )
    return SYSTEMS[best]


def _iterations(found: Imported, system: System, values: Values, rows: int | None) -> tuple[int, str]:
    """The number of iterations, and its origin when no key of the file has it."""
    if "iterations" in found.values:
        return found.values["iterations"], ""
    epochs, groups = values.get(system.epochs) or 1, found.values.get("groups_per_iteration", 1)
    if rows is None:
        what = f"{epochs:g} passes over the data in steps of {groups} prompts"
        return _PLACEHOLDER, f"CHECK: {what}; --rows N computes it, and what is a part of it (warm-up)"
    iterations = max(1, math.ceil(epochs * (rows // groups)))
    return iterations, f"{system.epochs}: {epochs:g} passes of {rows} rows / {groups} prompts, without the rest of a pass"
