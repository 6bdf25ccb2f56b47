"""Loads a reward function from its source.

Invariant: the version of a reward identifies the code and the options that produced a score.
"""

import hashlib
import importlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from polyreme.config.python_source import load_module
from polyreme.errors import ConfigError
from polyreme_reward.items import Item
from polyreme_reward.plugins.signatures import adapt

ENTRY_POINTS = "polyreme.rewards"
USUAL_NAMES = ("reward", "score", "compute_score", "reward_func", "reward_fn")


Source = Mapping[str, Any]
"""Where a reward is loaded from, as the configuration says it, with its `options`."""


@dataclass(frozen=True)
class Loaded:
    """A reward in a worker. `unwrap(call(item))` is an answer for `outcome_of`. If `call` returns a coroutine, await it first."""

    call: Callable[[Item], object]
    unwrap: Callable[[object], object]
    version: str
    description: str
    reads_tokens: bool = False


def load(source: Source) -> Loaded:
    """Loads a reward.

    Args:
        source: `options` and one of `builtin` (a name), `path` with `code` (a file and the text that the service read), `module`,
            and `entry_point`. `function` optionally names the function.

    Raises:
        ConfigError: the source has no usable function. Errors that the plugin raises at import are not caught.
    """
    options = source["options"]
    if (name := source.get("builtin")) is not None:
        # Not at the top: a process without built-in rules starts in half the time.
        from polyreme_reward.rules import BUILTINS, builtin_version, make_rule

        rule = make_rule(name, options)
        note = getattr(rule, "note", "")  # what the rule has detected about its environment
        description = f"{BUILTINS[name].description} ({note})" if note else BUILTINS[name].description
        return Loaded(rule, lambda answer: answer, builtin_version(name, options), description)
    if (path := source.get("path")) is not None:
        module = load_module(path, source["code"])
        function, code = _function(module, source.get("function"), path), source["code"]
    elif (name := source.get("module")) is not None:
        module = importlib.import_module(name)
        function, code = _function(module, source.get("function"), f"the module {name}"), _code(module)
    else:
        name = source["entry_point"]
        function = next(iter(entry_points(group=ENTRY_POINTS, name=name))).load()
        code = _code(inspect.getmodule(function) or function)
    adapted = adapt(function, options)
    digest = hashlib.sha256(json.dumps([code, function.__qualname__, options], sort_keys=True, default=str).encode()).hexdigest()
    summary = (inspect.getdoc(function) or f"{function.__name__} of {path or name}").partition("\n")[0]
    return Loaded(
        adapted.call,
        adapted.unwrap,
        f"{function.__name__}-{digest[:12]}",
        f"{summary} ({adapted.convention})",
        adapted.reads_tokens,
    )


def _function(module: ModuleType, name: str | None, where: str) -> Callable[..., Any]:
    own = {
        key: value
        for key, value in vars(module).items()
        if callable(value) and not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    if name is not None:
        found = getattr(module, name, None)
        if not callable(found):
            raise no_function(name, own, where)
        return found
    return own[choose_function(list(own), where)]


def choose_function(own: Sequence[str], where: str) -> str:
    """The name of the reward function among a module's own public functions. Raises ConfigError when it is ambiguous."""
    candidates = [key for key in USUAL_NAMES if key in own] or list(own)
    if len(candidates) != 1:
        raise ConfigError(
            f"one reward function in {where}: {', '.join(USUAL_NAMES)}, or the only public function",
            f"the functions {sorted(own)}",
            "Set `function`.",
        )
    return candidates[0]


def no_function(name: str, own: Iterable[str], where: str) -> ConfigError:
    """The error for a module without the configured function."""
    return ConfigError(f"a function {name} in {where}", f"the functions {sorted(own)}", "Fix `function`.")


def _code(module: ModuleType | Callable[..., object]) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):  # an extension module has no source
        return str(getattr(module, "__version__", getattr(module, "__name__", "")))
