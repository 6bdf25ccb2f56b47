"""The first code inside the sandbox. It gets `job`, and in `sys.argv` three file descriptors: job, result, channel (-1: none).

`job` is a dictionary with `kind`, `program`, `limits` (bytes or seconds by resource), `paths` (directories of packages), `folder`
(the directory of this file), and further keys by kind:

- script: the program runs as a script.
- call: the function `name` is called with `arguments` (JSON), and its value is written to RESULT as JSON. The names that
  LeetCode's editor imports are available.
- serve: the program's process answers requests of `evaluator` on CHANNEL.
- check: `test` is executed against the program behind CHANNEL, and the verdict is written to RESULT.
- interpret: code that comes on CHANNEL is executed call by call (`interpreter`). There is no `program`.

Invariant: the first byte on RESULT is a line feed. It is written after the limits are set and before the program's code runs. All
later bytes are untrusted. Imports are few and late, since they dominate the start time. So this file also arrives compiled.
"""

import posix  # `os` without its imports
import resource
import sys

TYPE_CHECKING = False  # importing `typing` would cost more than everything else
if TYPE_CHECKING:
    from typing import Any

_RECURSION = 100_000


def main(job: "dict[str, Any]", result_fd: int, channel_fd: int) -> None:
    for name, limit in job["limits"].items():
        what = getattr(resource, name)
        hard = resource.getrlimit(what)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (limit, limit))
    sys.path += job["paths"]
    sys.argv = ["program.py"]
    if "program" in job and job["kind"] != "check":
        sys.setrecursionlimit(_RECURSION)
        with open("program.py", "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(job["program"])
    _add_builtins()
    null = posix.open("/dev/null", posix.O_WRONLY)
    posix.dup2(null, 2)  # stderr was the sandbox's error output until here
    posix.close(null)
    posix.write(result_fd, b"\n")
    if job["kind"] == "script":
        posix.close(result_fd)
        _execute(job["program"], "__main__", {})
    elif job["kind"] == "call":
        _call(job, result_fd)
    else:
        _make_importable(job["folder"])
        if job["kind"] == "serve":
            from polyreme.isolation.sandbox.inside import server

            posix.close(result_fd)
            server.serve(channel_fd, lambda: _execute(job["program"], "program", {}))
        elif job["kind"] == "interpret":
            from polyreme.isolation.sandbox.inside import interpreter

            posix.close(result_fd)
            interpreter.serve(channel_fd)
        else:
            from polyreme.isolation.sandbox.inside import evaluator

            posix.write(result_fd, evaluator.verdict(channel_fd, job["test"]).encode("utf-8", "replace"))


class _Notice:
    """A built-in text such as `copyright`, which prints itself."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def __call__(self) -> None:
        print(self._text)


def _add_builtins() -> None:
    """Adds the names that Python's `site` adds, which does not run here: exit, quit, help and the notices."""
    import _sitebuiltins
    import builtins

    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D (i.e. EOF)"))
    notices = {
        "copyright": sys.copyright,
        "credits": "See https://www.python.org.",
        "license": "See https://www.python.org/psf/license/",
    }
    for name, text in notices.items():
        setattr(builtins, name, _Notice(text))
    builtins.help = _sitebuiltins._Helper()


def _make_importable(folder: str) -> None:
    """Registers this directory under its package's name, since its parent directories do not exist here."""
    for name in ("polyreme", "polyreme.isolation", "polyreme.isolation.sandbox", "polyreme.isolation.sandbox.inside"):
        package = type(sys)(name)
        package.__path__ = [folder]
        sys.modules[name] = package


def _execute(program: str, name: str, given: dict[str, object]) -> dict[str, object]:
    """Runs the program as module `name` with the globals `given`. Returns its globals."""
    module = type(sys)(name)
    module.__dict__.update(given, __file__="program.py")
    sys.modules[name] = module
    exec(compile(program, "program.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def _call(job: dict[str, str], result_fd: int) -> None:
    import json

    given: dict[str, object] = {}
    for module in ("typing", "collections", "functools", "itertools", "heapq", "bisect"):
        exec(f"from {module} import *", given)
    exec("from math import ceil, comb, floor, gcd, inf, log, sqrt", given)
    exec("import bisect, collections, functools, heapq, itertools, math, operator, random, re, string", given)
    namespace = _execute(job["program"], "program", given)
    function = namespace.get(job["name"])
    if function is None and "Solution" in namespace:
        function = getattr(namespace["Solution"](), job["name"])  # type: ignore[operator]
    value = function(*json.loads(job["arguments"]))  # type: ignore[operator]  # an unknown function is a TypeError, which fails the test
    data = json.dumps(value, default=lambda each: each.item()).encode()  # NumPy's numbers are no failure
    while data:
        data = data[posix.write(result_fd, data) :]


if __name__ == "__main__":
    _own = sys.modules["__main__"]  # keeps this module alive when a script takes its name
    main(globals()["job"], *map(int, sys.argv[2:]))
