"""The program's side of an assertion: runs the program, then performs the evaluator's requests on its functions and objects.

Invariant: nothing here decides a verdict, since the program shares this process and can forge everything in it. Expected values
never arrive here unless the test itself passes them to the program.
"""

import operator
import sys
from collections.abc import Callable, Mapping

from polyreme.isolation.sandbox.inside import values

REFLECTED = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
OPERATIONS: dict[str, Callable[..., object]] = {
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
    **{name: getattr(operator, name) for name in REFLECTED},
}


def serve(fd: int, execute: Callable[[], Mapping[str, object]]) -> None:
    """Runs the program, then answers requests until the channel closes.

    First sends {"names": globals}. Requests are {"get": name} and {"do": operation, "args": values}. Replies are {"value": value,
    "args": arguments after the call}, {"library": [module, name or null]} for a library object, and {"raised": [type, message]}.
    """
    objects: list[object] = []
    numbers: dict[int, int] = {}

    def reference(value: object) -> int:
        number = numbers.get(id(value))
        if number is None:
            number = numbers[id(value)] = len(objects)
            objects.append(value)  # keeps the object alive, so that its id stays unique
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
        except Exception as error:  # noqa: BLE001 the program may raise anything
            reply = {"raised": [type(error).__name__, str(error)[:1000]]}
        values.send(fd, reply)


def _library(value: object) -> list[str | None] | None:
    """The module, or module and name, from which a value of the program's globals was imported. None for its own values."""
    if type(value) is type(operator):
        return [value.__name__, None]
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if type(module) is str and type(name) is str and module != "program" and hasattr(sys.modules.get(module), name):
        return [module.removeprefix("_"), name]
    return None
