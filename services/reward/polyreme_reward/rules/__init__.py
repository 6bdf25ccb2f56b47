"""The built-in rewards by name.

Invariant: a rule that runs in the service's process needs time linear in its texts and never blocks.
"""

import difflib
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version as package_version
from importlib.util import find_spec
from typing import Any

from pydantic import ValidationError, validate_call

from polyreme.errors import ConfigError
from polyreme_reward.items import Item
from polyreme_reward.rules.answers import exact, numeric
from polyreme_reward.rules.choice import choice
from polyreme_reward.rules.code import code
from polyreme_reward.rules.math import math
from polyreme_reward.rules.puzzles import knights_and_knaves
from polyreme_reward.rules.shape import length, overlong, repetition, think_format

Rule = Callable[[Item], object]


@dataclass(frozen=True)
class Builtin:
    """A built-in rule.

    Attributes:
        factory: returns the rule. Its keyword arguments are the reward's `options`.
        in_process: whether the rule may run in the service's process.
        preload: modules that its workers share.
        needs: columns of which a row must have one; "label" stands for the label. Empty: none.
        correctness: whether the value is 1 for a right answer and 0 for a wrong one.
        graded_by: option with which the value has more steps than these two.
    """

    factory: Callable[..., Rule]
    in_process: bool
    preload: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    correctness: bool = False
    graded_by: str = ""

    @property
    def description(self) -> str:
        return (inspect.getdoc(self.factory) or "").partition("\n\n")[0].replace("\n", " ")


BUILTINS: dict[str, Builtin] = {
    "exact": Builtin(exact, in_process=True, needs=("label",), correctness=True),
    "numeric": Builtin(numeric, in_process=True, needs=("label",), correctness=True),
    "choice": Builtin(choice, in_process=True, needs=("label",), correctness=True),
    "math": Builtin(math, in_process=False, preload=("math_verify",), needs=("label",), correctness=True),
    "code": Builtin(code, in_process=False, needs=("tests", "label"), correctness=True, graded_by="partial"),
    "think_format": Builtin(think_format, in_process=True),
    "knights_and_knaves": Builtin(knights_and_knaves, in_process=True, needs=("label",), correctness=True, graded_by="scores"),
    "length": Builtin(length, in_process=True),
    "overlong": Builtin(overlong, in_process=True),
    "repetition": Builtin(repetition, in_process=True),
}


def make_rule(name: str, options: Mapping[str, object]) -> Rule:
    """The rule `name` with its options. Raises ConfigError for an unknown name or option, or an invalid value."""
    return _with_options(name, _builtin(name).factory, options)


def check_rule(name: str, options: Mapping[str, object]) -> Builtin:
    """Checks a built-in rule without creating it, since that may start a sandbox. Returns the rule's entry.

    Raises:
        ConfigError: the name or an option is unknown, a value is invalid, or a package is missing.
    """
    builtin = _builtin(name)

    @functools.wraps(builtin.factory)
    def nothing(*_: object, **__: object) -> None: ...

    _with_options(name, nothing, options)
    if missing := [module for module in builtin.preload if find_spec(module) is None]:
        raise ConfigError(f"the packages of the reward {name}", f"no {', '.join(missing)}", "Install polyreme-reward[math].")
    return builtin


def _builtin(name: str) -> Builtin:
    builtin = BUILTINS.get(name)
    if builtin is None:
        near = difflib.get_close_matches(name, BUILTINS, n=1)
        raise ConfigError(
            f"the name of a built-in reward ({', '.join(sorted(BUILTINS))})",
            repr(name),
            f"Did you mean {near[0]}?"
            if near
            else "Use one of these names, or set `file`, `module` or `url` for your own reward.",
        )
    return builtin


def _with_options(name: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    try:
        return validate_call(factory)(**options)
    except ValidationError as error:
        known = ", ".join(inspect.signature(factory).parameters) or "none"
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"options of the reward {name} ({known})", problems, "Fix reward.rewards.") from None


def builtin_version(name: str, options: Mapping[str, object]) -> str:
    """The version of a rule, which changes with the package's version and the options."""
    digest = hashlib.sha256(json.dumps([name, dict(options)], sort_keys=True, default=str).encode()).hexdigest()[:8]
    return f"{name}-{package_version('polyreme-reward')}-{digest}"
