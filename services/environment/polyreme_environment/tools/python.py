"""The tool `python`: an interpreter in a sandbox, which lives as long as its episode.

Invariant: code of the policy runs in no process but its own, and none of it runs between two calls. An interpreter ends with its
episode, or with its worker.
"""

import resource
from collections.abc import Callable, Mapping
from typing import Any

from polyreme.config.environment import PythonLimits
from polyreme.isolation.sandbox.interpreter import Interpreter, LateStartError
from polyreme.isolation.sandbox.modes import choose
from polyreme.isolation.sandbox.program import Limits, SandboxError
from polyreme_environment.contract import FailedCallError, LostError
from polyreme_environment.tool_schema import Schema

_ABOUT = (
    "Runs Python code in an interpreter that keeps its variables from call to call. Returns what the code prints, the value of a"
    " last expression, and the traceback of an exception. There is no network, no input, and no file but in the current"
    " directory. A call may take {seconds:g} seconds and the interpreter {memory_mib} MiB of memory."
)
_START_SECONDS = 5.0
"""In which an interpreter starts on a machine that works. A call with less is one of very many in its answer."""


def python_schema(limits: PythonLimits) -> Schema:
    """What the policy is told of the tool."""
    about = _ABOUT.format(seconds=limits.seconds, memory_mib=limits.memory_mib)
    code = {"type": "string", "description": "the Python code"}
    parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
    return {"type": "function", "function": {"name": "python", "description": about, "parameters": parameters}}


def python_tool(settings: Mapping[str, object]) -> Callable[..., str]:
    """The tool as a method of RowTools. `settings`: the fields of PythonLimits.

    Raises:
        ConfigError: no sandbox works here.
    """
    given, key = PythonLimits.model_validate(settings), "environment.tools: [{python: {unsafe: true}}]"
    mode = choose(given.unsafe, needs="the tool `python`", service="environment", option=key)
    limits = Limits(given.seconds, given.memory_mib, output_bytes=given.output_bytes)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # an interpreter has six open files, and a worker many interpreters

    def python(self: Any, seconds: float, /, code: str) -> str:
        interpreter = self.kept.setdefault("python", Interpreter(mode, limits))
        try:
            if not seconds:
                raise LateStartError("the calls before it have taken all of the time")
            said = interpreter.run(code, seconds)
        except (SandboxError, OSError) as error:
            if isinstance(error, LateStartError) and seconds < _START_SECONDS:
                raise FailedCallError(str(error), f"error: {error}; make fewer calls at once") from None
            raise LostError(f"an interpreter in a sandbox ({mode}): {error}") from None
        if said.error:
            raise FailedCallError(said.error, said.text)
        return str(said.text)

    python.schema = python_schema(given)  # type: ignore[attr-defined]
    python.takes_seconds = True  # type: ignore[attr-defined]
    return python
