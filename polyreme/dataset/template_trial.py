"""A trial of a chat template in a process of its own, before a template is used.

A template is a program that comes with a model. The sandbox of jinja2 keeps it from files and processes, but not from loops that
never end or texts that fill the memory, which no thread of this process could interrupt. Invariant: a template that needs more
than the limits for short conversations ends its trial's process, and nothing else.

As a program, it reads a JSON object {template, variables, chats} and writes the characters of each text. It imports only jinja2.
"""

import json
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from polyreme.errors import ConfigError

SECONDS = 5
"""Processor time of a trial. Templates of models need milliseconds."""
_WALL_SECONDS = 300.0
_MEMORY = 512 << 20
_LONGEST = 1 << 20
"""Characters of the longest text that a template may write for a short conversation."""
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A tag by which transformers finds the tokens of answers. It writes nothing."""
_USER, _ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}
_CHATS: tuple[dict[str, object], ...] = (
    {"messages": [_USER]},
    {"messages": [{"role": "system", "content": "s"}, _USER, _ANSWER]},
    {"messages": [_USER, _ANSWER] * 8 + [_USER]},
    {"messages": [{"role": "user", "content": "a longer question, " * 200}]},
    {"messages": [_USER, _ANSWER, _USER], "tools": [_TOOL]},
)
"""The conversations of a trial. A template may refuse some of them, which is no matter of a trial."""
_TOO_MUCH = 3
"""The exit status after more memory or a longer text than allowed."""


def try_template(template: str, variables: Mapping[str, object]) -> None:
    """Renders short conversations within limits, once in this process for each template.

    Args:
        variables: further variables of the template, such as `eos_token`.

    Raises:
        ConfigError: the template exceeds a limit.
    """
    _try(template, json.dumps({key: value for key, value in variables.items() if isinstance(value, str)}))


@cache
def _try(template: str, variables: str) -> None:
    given = json.dumps({"template": template, "variables": json.loads(variables), "chats": _CHATS})
    try:
        done = subprocess.run([sys.executable, "-P", __file__], input=given.encode(), capture_output=True, timeout=_WALL_SECONDS)
    except subprocess.TimeoutExpired:
        _refuse(f"one that does not end within {_WALL_SECONDS:.0f} s")
    if done.returncode == _TOO_MUCH:
        _refuse(done.stdout.decode())
    if done.returncode < 0:
        _refuse(f"one that needs more than {SECONDS} s of processor time ({signal.Signals(-done.returncode).name})")
    if done.returncode:
        raise RuntimeError(f"the trial of a chat template failed: {done.stderr.decode(errors='replace')[-1000:]}")


def _refuse(found: str) -> NoReturn:
    raise ConfigError("a chat template that writes a short conversation in a moment", found, "Use another chat template.")


def _main() -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = json.load(sys.stdin)
    for chat in given["chats"]:
        for opened in (True, False):
            try:
                length = _length(
                    given["template"], {**given["variables"], "tools": None, **chat, "add_generation_prompt": opened}
                )
            except MemoryError:
                print(f"one that needs more than {_MEMORY >> 20} MiB", end="")
                return _TOO_MUCH
            except Exception:  # noqa: BLE001 what a template refuses, or how it is wrong, is reported where it is used
                continue
            if length > _LONGEST:
                print(f"one that writes more than {_LONGEST} characters", end="")
                return _TOO_MUCH
    return 0


def _length(template: str, variables: Mapping[str, object]) -> int:
    """The characters that a template writes, counted to just above _LONGEST. Its environment has what transformers' has."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": refuse, "strftime_now": datetime(2026, 1, 1).strftime}
    length = 0
    for text in environment.from_string(_GENERATION.sub("", template)).generate(variables):
        length += len(text)
        if length > _LONGEST:
            break
    return length


if __name__ == "__main__":
    sys.exit(_main())
