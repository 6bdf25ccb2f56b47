"""Executes code call by call in one namespace, and shows of each call what a person at Python's prompt would see.

Invariant: nothing here is trusted, since the code shares this process. All that a call shows is written to standard output's
pipe; the channel only says that a call is over, in one line: why the code failed, or nothing.
"""

import ast
import linecache
import os
import sys
import traceback
from contextlib import suppress
from types import ModuleType, TracebackType

from polyreme.isolation.sandbox.inside import values

_REASON_CHARS = 300
_CALL = "<call "


def serve(fd: int) -> None:
    """Executes the code of each message on the channel `fd`, until it closes or the code ends the process."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    output = os.dup(1)
    number = 0
    while True:
        try:
            code = values.receive(fd)
        except EOFError:
            return
        number += 1
        _open_streams(output)
        failure = _execute(code, f"{_CALL}{number}>", module.__dict__)
        _flush()
        os.write(fd, f"{failure}\n".encode())


def _open_streams(output: int) -> None:
    """Makes both streams writable again if an earlier call has closed them."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(output, fd)
        stream = getattr(sys, name, None)
        if stream is None or stream is getattr(sys, f"__{name}__") or stream.closed:
            opened = open(fd, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
            setattr(sys, name, opened)


def _execute(code: str, name: str, namespace: dict[str, object]) -> str:
    """Executes the code and displays the value of its last expression. Returns why it failed, or ""."""
    linecache.cache[name] = len(code), None, [f"{line}\n" for line in code.split("\n")], name
    try:
        tree = ast.parse(code, name)
        shown = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        exec(compile(tree, name, "exec", dont_inherit=True), namespace)
        if shown:
            exec(compile(ast.Interactive(shown), name, "single", dont_inherit=True), namespace)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 code may raise anything
        return _show(error)
    return ""


def _show(error: BaseException) -> str:
    """Writes the traceback, without the frames of this file. Returns the error on one line."""
    frames: TracebackType | None = error.__traceback__
    while frames is not None and not frames.tb_frame.f_code.co_filename.startswith(_CALL):
        frames = frames.tb_next
    _flush()
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
        reason = traceback.format_exception_only(type(error), error)[-1]
    except BaseException as another:  # noqa: BLE001 of a lack of memory or stack, or by code of the error's class
        text = reason = f"{type(error).__name__}, which cannot be shown because of {type(another).__name__}\n"
    _write(text.encode("utf-8", "backslashreplace"))
    return " ".join(reason.split())[:_REASON_CHARS].encode("utf-8", "replace").decode()


def _write(data: bytes) -> None:
    with suppress(OSError):  # the code has closed it
        while data:
            data = data[os.write(2, data) :]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the code has closed or replaced it
            stream.flush()
