"""The program's side of an assertion: it runs the program, then does what the evaluator asks of its functions and objects.

Everything here is in the program's own process and can be forged by it. Nothing here therefore decides anything: it answers questions, and
the expected values never come here unless the test itself hands them to the program.
"""

import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

from polyreme_reward.sandbox.inside import values

_REFLECTED = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, args, keywords: function(*args, **keywords),
    "getattr": getattr,
    "setattr": setattr,
    "hasattr": hasattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "contains": operator.contains,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "next": next,
    "iter": iter,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "int": int,
    "float": float,
    "index": operator.index,
    "abs": abs,
    "neg": operator.neg,
    "enter": lambda manager: type(manager).__enter__(manager),
    "exit": lambda manager: type(manager).__exit__(manager, None, None, None),
    **{name: getattr(operator, name) for name in _REFLECTED},
}


def serve(fd: int, execute: Callable[[], Mapping[str, Any]]) -> None:
    """Runs the program, then answers until the channel ends.

    Out, first: {"names": globals}. In: {"get": name} or {"do": operation, "args": values}. Out: {"value": value, "args": what became of the
    arguments}, {"library": [module, name or null]} for what came from Python's library, or {"raised": [type, message]}.
    """
    objects: list[Any] = []
    numbers: dict[int, int] = {}

    def reference(value: Any) -> int:
        number = numbers.get(id(value))
        if number is None:
            number = numbers[id(value)] = len(objects)
            objects.append(value)  # kept: its id stays its own
        return number

    namespace = execute()
    values.send(fd, {"names": [name for name in namespace if type(name) is str]})
    while True:
        try:
            message = values.receive(fd)
        except EOFError:
            return
        try:
            if "get" in message:
                value = namespace[message["get"]]
                if (library := _library(value)) is not None:
                    values.send(fd, {"library": library})
                    continue
                args = []
            else:
                args = [values.decode(arg, objects.__getitem__) for arg in message["args"]]
                value = OPERATIONS[message["do"]](*args)
            reply = {"value": values.encode(value, reference), "args": [values.encode(arg, reference) for arg in args]}
        except Exception as error:  # noqa: BLE001 the program's own, whatever it is
            reply = {"raised": [type(error).__name__, str(error)[:1000]]}
        values.send(fd, reply)


def _library(value: Any) -> list[str | None] | None:
    """The module, or the module and name, that a value of the program's globals was imported from; None: it is its own."""
    if type(value) is type(operator):
        return [value.__name__, None]
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if type(module) is str and type(name) is str and module != "program" and hasattr(sys.modules.get(module), name):
        return [module.removeprefix("_"), name]
    return None
