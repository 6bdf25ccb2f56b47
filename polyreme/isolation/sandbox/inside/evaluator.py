"""The trusted side of an assertion: runs the test in a process that the program cannot access.

Invariant: every comparison of the test happens here, on values of exact built-in types. The program only decides what its own
functions and objects return. An object that is not a plain value is a `Remote`: it can be called, indexed and iterated, but
comparing it fails the test, whatever its `__eq__` returns. A name is looked up in the test, Python's builtins and the TRUSTED
modules before the program, so a program cannot replace `abs` or `all`.
"""

import builtins
import importlib
from collections.abc import Callable
from typing import Any

from polyreme.isolation.sandbox.inside import values
from polyreme.isolation.sandbox.inside.server import REFLECTED

TRUSTED = (
    "bisect", "cmath", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq",
    "itertools", "json", "math", "numpy", "operator", "random", "re", "statistics", "string", "sys", "typing",
)  # fmt: skip
_SHORT = {"np": "numpy"}
_NUMBERS = ("len", "bool", "int", "float", "index", "abs")


class UnsafeTest(BaseException):
    """The test requests an unsafe operation. It derives from BaseException, so that a test does not catch it by accident."""


class Failed(BaseException):
    """The program no longer answers, or its answer is invalid."""


class ProgramError(Exception):
    """An exception of a type that only the program defines."""


class _Program:
    """The connection to the program's process."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.names = frozenset(self._receive().get("names", ()))

    def _receive(self) -> dict[str, Any]:
        try:
            message = values.receive(self.fd)
        except (EOFError, OSError, ValueError, RecursionError) as error:
            raise Failed(repr(error)) from None
        if type(message) is not dict:
            raise Failed("no reply")
        return message

    def get(self, name: str) -> Any:
        """The program's value of a name. A standard library object imported under its own name is taken from the library here."""
        reply = self._ask({"get": name})
        if "library" in reply:
            module, attribute = reply["library"]
            if module not in TRUSTED or attribute != name:
                raise Failed(f"{name} is {module}.{attribute}")
            return getattr(importlib.import_module(module), name)
        return self._value(reply["value"])

    def do(self, operation: str, *args: Any) -> Any:
        """An operation of the program. Arithmetic with a value of the test, which may be the expected one, gives an object that
        gives no number: the program could choose that of `abs(f(x) - 3) < 1e-6`. `list` asks for a length, but needs none."""
        is_told = any(type(arg) is Remote and object.__getattribute__(arg, "_told") for arg in args)
        if is_told and operation in _NUMBERS:
            raise (TypeError if operation == "len" else Failed)(
                "the test compares an object that the program has computed from a value of the test"
            )
        try:
            sent = [values.encode(arg, _number) for arg in args]
        except values.Unplain as error:
            raise UnsafeTest(f"expected arguments that are plain values or the program's objects; found {error}") from None
        reply = self._ask({"do": operation, "args": sent})
        if operation == "call":
            try:
                _, positional, keywords = (self._value(each) for each in reply["args"])
                for arg, after in zip((*args[1], *args[2].values()), (*positional, *keywords.values()), strict=True):
                    _restore(arg, after)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise Failed(repr(error)) from None
        value = self._value(reply["value"])
        if operation in (*REFLECTED, "neg") and (is_told or not all(type(arg) is Remote for arg in args)):
            if type(value) is not Remote:
                raise Failed("the test compares an object of the program by arithmetic with a plain value")
            object.__setattr__(value, "_told", True)
        return value

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            values.send(self.fd, message)
        except values.Unplain as error:
            raise UnsafeTest(str(error)) from None
        except OSError as error:
            raise Failed(repr(error)) from None
        reply = self._receive()
        if "raised" in reply:
            name, text = map(str, reply["raised"])
            kind = getattr(builtins, name, None)
            if kind is StopIteration and message.get("do") != "next":
                raise ProgramError(f"{name}: {text}")  # it would end a loop of the test, as in all(map(...))
            if isinstance(kind, type) and issubclass(kind, Exception):
                try:
                    raised = kind(text)
                except TypeError:  # its constructor needs more than a message
                    raised = ProgramError(f"{name}: {text}")
                raise raised
            raise ProgramError(f"{name}: {text}")
        return reply

    def _value(self, data: Any) -> Any:
        try:
            return values.decode(data, lambda number: Remote(self, int(number)))
        except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
            raise Failed(repr(error)) from None


def _restore(value: Any, after: Any) -> None:
    """Updates a mutable argument to its state after the call."""
    if type(value) is not type(after):
        raise TypeError("another argument")
    if type(value) is list or type(value).__name__ == "ndarray":
        value[:] = after
    elif type(value) in (dict, set):
        value.clear()
        value.update(after)
    elif type(value).__name__ == "deque":
        value.clear()
        value.extend(after)


def _number(value: object) -> int:
    if type(value) is Remote:
        return object.__getattribute__(value, "_number")
    raise values.Unplain(f"a {type(value).__name__}")


def _forward(operation: str) -> Callable[..., object]:
    return lambda self, *args: object.__getattribute__(self, "_program").do(operation, self, *args)


def _reflect(operation: str) -> Callable[..., object]:
    return lambda self, other: object.__getattribute__(self, "_program").do(operation, other, self)


def _compare(self: object, other: object) -> Any:
    raise Failed("the test compares an object of the program; only plain values can be compared")


class Remote:
    """A reference to an object of the program. `_told`: it is the result of arithmetic with a value of the test."""

    def __init__(self, program: _Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_told", False)

    def __call__(self, *args: object, **keywords: object) -> object:
        return object.__getattribute__(self, "_program").do("call", self, args, keywords)

    def __getattr__(self, name: str) -> object:
        return object.__getattribute__(self, "_program").do("getattr", self, name)

    def __iter__(self) -> object:
        return object.__getattribute__(self, "_program").do("iter", self)

    def __exit__(self, *_: object) -> object:
        return object.__getattribute__(self, "_program").do("exit", self)

    def __instancecheck__(self, value: object) -> object:
        return type(value) is Remote and object.__getattribute__(self, "_program").do("isinstance", value, self)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compare
    __hash__ = object.__hash__


for _name in ("setattr", "getitem", "setitem", "delitem", "contains", "next", "str", "repr", "enter", "neg", *_NUMBERS):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in REFLECTED:
    setattr(Remote, f"__{_name.strip('_')}__", _forward(_name))
    setattr(Remote, f"__r{_name.strip('_')}__", _reflect(_name))


class _Names(dict[str, object]):
    """The test's globals. A name that neither the test nor Python defines is looked up in the program."""

    def __init__(self, program: _Program) -> None:
        super().__init__(__builtins__=builtins, __name__="test")
        self.program = program

    def __missing__(self, name: str) -> object:
        if hasattr(builtins, name):
            raise KeyError(name)
        if (module := _SHORT.get(name, name)) in TRUSTED:
            return importlib.import_module(module)
        if name in self.program.names:
            return self.program.get(name)
        raise KeyError(name)


def verdict(fd: int, test: str) -> str:
    """Runs the test. Returns "pass", "fail", or "error: " and the reason why the test cannot run."""
    try:
        program = _Program(fd)
    except Failed:
        return "fail"
    try:
        code = compile(test, "test", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError) as error:
        return f"error: expected a test in Python; found {error!r}"
    try:
        exec(code, _Names(program))
    except UnsafeTest as error:
        return f"error: {error}"
    except BaseException:  # noqa: BLE001 any exception fails the test
        return "fail"
    return "pass"
