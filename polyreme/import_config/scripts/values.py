"""The values of a Python program's expressions, as far as they are known without running it.

Invariant: a value is the one that the program has when it starts without arguments and without variables of the environment.
Anything else raises `Open`. Pure.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from polyreme.import_config.scripts.names import Binding, Open, ScriptProgram

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b, ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}  # fmt: skip
_UNARY: dict[type, Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_}
_FUNCTIONS: dict[str, Callable[..., object]] = {
    "dict": dict, "int": int, "float": float, "str": str, "bool": bool, "len": len, "min": min, "max": max, "abs": abs,
    "round": round, "list": list, "tuple": list,
    "os.path.join": lambda *parts: "/".join(parts), "os.path.expanduser": str,
    "os.path.basename": lambda text: text.rpartition("/")[2], "pathlib.Path": lambda *parts: "/".join(parts),
}  # fmt: skip
_METHODS = frozenset(
    (
        "split",
        "rsplit",
        "replace",
        "lower",
        "upper",
        "strip",
        "lstrip",
        "rstrip",
        "removeprefix",
        "removesuffix",
        "join",
        "get",
        "copy",
    )
)
_ENUMS = ("SchedulerType", "IntervalStrategy", "OptimizerNames", "SaveStrategy", "HubStrategy")
_DTYPES = ("bfloat16", "float16", "float32", "half", "float")
_ENVIRONMENT = ("os.environ.get", "os.getenv", "environ.get", "getenv")
_LARGEST = 10**18
_LONGEST = 100_000


class Values:
    """Reads the expressions of a program.

    Attributes:
        defaults: what a command line or the environment would decide, and whose default was read.
    """

    def __init__(self, program: ScriptProgram, field_of: "Callable[[Values, ast.Attribute], ast.expr]"):
        """`field_of` returns the expression of `name.field`, for configurations that the program defines itself; raises Open."""
        self._field_of = field_of
        self.program = program
        self.defaults: dict[str, object] = {}
        self._reading: list[ast.AST] = []

    def of(self, node: ast.expr) -> Any:
        """The value of an expression: a number, text, None, list or mapping. Raises Open."""
        if node in self._reading or len(self._reading) > 200:
            raise Open(node, "a value that depends on itself")
        self._reading.append(node)
        try:
            value = self._of(node)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, ArithmeticError) as error:
            raise Open(node, f"an expression that fails ({type(error).__name__})") from error
        finally:
            self._reading.pop()
        if (isinstance(value, int) and abs(value) > _LARGEST) or (isinstance(value, str | list) and len(value) > _LONGEST):
            raise Open(node, "a value that is too large")
        return value

    def _of(self, node: ast.expr) -> object:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [self.of(part) for part in parts]
            case ast.Dict():
                return self._mapping(node)
            case ast.JoinedStr(values=parts):
                return "".join(self._part(part) for part in parts)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
                return _UNARY[type(op)](self.of(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return self._arithmetic(node, self.of(left), self.of(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.of(left), self.of(right))
            case ast.BoolOp(op=op, values=[*parts]):
                found = self.of(parts[0])
                for part in parts[1:]:
                    found = found and self.of(part) if isinstance(op, ast.And) else found or self.of(part)
                return found
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.of(body) if self._condition(test) else self.of(orelse)
            case ast.Subscript(value=value, slice=ast.Slice()):
                raise Open(node, "a part of a value")
            case ast.Subscript(value=value, slice=place):
                if self.name_of(value) in ("os.environ", "environ"):
                    raise Open(node, "a variable of the environment")
                return self.of(value)[self.of(place)]
            case ast.Name() | ast.Attribute():
                return self._named(node)
            case ast.Call():
                return self._call(node)
        raise Open(node, _what(node))

    def _condition(self, test: ast.expr) -> object:
        try:
            return self.of(test)
        except Open as error:
            raise Open(test, f"a condition ({error.why})") from None

    def _mapping(self, node: ast.Dict) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            found |= {str(self.of(key)): self.of(value)} if key is not None else self.of(value)
        return found

    def _part(self, part: ast.expr) -> str:
        if not isinstance(part, ast.FormattedValue):
            return str(self.of(part))
        text = self.of(part.value)
        if part.conversion != -1:
            raise Open(part, "a conversion in a text")
        return format(text, "" if part.format_spec is None else self.of(part.format_spec))

    def _arithmetic(self, node: ast.BinOp, left: Any, right: Any) -> object:
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise Open(node, "a value that is too large")
        repeats = isinstance(node.op, ast.Mult) and not (isinstance(left, int | float) and isinstance(right, int | float))
        if repeats and (max(len(each) if isinstance(each, str | list) else abs(each) for each in (left, right)) > 1000):
            raise Open(node, "a value that is too large")
        if isinstance(node.op, ast.Mod) and isinstance(left, str):
            raise Open(node, "a text with %")
        if isinstance(node.op, ast.Div) and isinstance(left, str):
            return f"{left}/{right}"  # a Path
        return _OPERATORS[type(node.op)](left, right)

    def _named(self, node: ast.Name | ast.Attribute) -> object:
        dotted = self.name_of(node) or ""
        first, _, last = dotted.rpartition(".")
        if first == "torch" and last in _DTYPES:
            return {"half": "float16", "float": "float32"}.get(last, last)
        if first.rpartition(".")[2] in _ENUMS:
            return last.lower()
        if isinstance(node, ast.Attribute):
            return self.of(self._field_of(self, node))
        origin, item = self.origin(node)
        if isinstance(origin, ast.Name) or origin is node:
            raise Open(node, "a name of another module")
        return self.of(origin) if item is None else self.of(origin)[item]

    def origin(self, node: ast.expr, passed: list[ast.Name] | None = None) -> tuple[ast.expr, int | None]:
        """Follows names to the expression that they stand for, and the element of it; `passed` gets the names. Raises Open."""
        item = None
        for _ in range(50):
            if not isinstance(node, ast.Name) or item is not None:
                return self._element(node, item)
            if passed is not None:
                passed.append(node)
            binding = self.program.binding(node.id, node)
            if isinstance(binding.node, ast.arg):
                node = self._argument(binding.node, node.id)
            elif binding.value is not None:
                node, item = binding.value, binding.item
            elif binding.why:
                raise Open(binding.node, binding.why)
            else:
                return node, None
        raise Open(node, "a value that depends on itself")

    def _element(self, node: ast.expr, item: int | None) -> tuple[ast.expr, int | None]:
        """`call()[0]` as the call and its element."""
        match node:
            case ast.Subscript(value=value, slice=ast.Constant(value=int() as place)) if item is None:
                inner, of_inner = self.origin(value)
                if isinstance(inner, ast.Call) and of_inner is None:
                    return inner, place
            case ast.IfExp(test=test, body=body, orelse=orelse) if item is None:
                return self.origin(body if self._condition(test) else orelse)
        return node, item

    def _argument(self, parameter: ast.arg, name: str) -> ast.expr:
        """What a function of the script is called with, if there is one call; its default if there is none."""
        function = self.program.places[parameter].scope
        if not isinstance(function, ast.FunctionDef):
            raise Open(parameter, f"`{name}` is a parameter")
        calls = [each for each in self.program.calls() if isinstance(each.func, ast.Name) and each.func.id == function.name]
        if len(calls) > 1 or any(isinstance(each, ast.Starred) for call in calls for each in call.args):
            raise Open(parameter, f"`{name}` is a parameter of a function with several calls")
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        for call in calls:
            if any(word.arg is None for word in call.keywords):
                raise Open(call, "a call with **")
            if name in names and names.index(name) < len(call.args):
                return call.args[names.index(name)]
            if found := [word.value for word in call.keywords if word.arg == name]:
                return found[0]
        usual = _defaults(function.args).get(name)
        if usual is None:
            raise Open(parameter, f"`{name}` is a parameter without a default")
        if not calls:
            self.defaults[name] = ast.unparse(usual)
        return usual

    def _call(self, node: ast.Call) -> object:
        name = self.name_of(node.func) or ""
        if any(isinstance(each, ast.Starred) for each in node.args):
            raise Open(node, "a call with *")
        if name in _ENVIRONMENT:
            if len(node.args) + len(node.keywords) < 2:
                raise Open(node, "a variable of the environment")
            if (change := self.program.changed.get(f"${self.of(node.args[0])}")) is not None:
                raise Open(change, "a variable of the environment that the script sets")
            usual = self.of(node.args[1] if len(node.args) > 1 else node.keywords[0].value)
            self.defaults[f"${{{self.of(node.args[0])}}}"] = usual
            return usual
        if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(self.of(each) for each in node.args), **self.keywords(node))
        if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            value = self.of(node.func.value)
            if isinstance(value, str | Mapping):
                return getattr(value, node.func.attr)(*(self.of(each) for each in node.args))
        raise Open(node, f"the call {_short(node.func)}(...)")

    def keywords(self, node: ast.Call) -> dict[str, object]:
        """The keyword arguments of a call, with those of `**` mappings."""
        found: dict[str, object] = {}
        for word in node.keywords:
            found |= self.of(word.value) if word.arg is None else {word.arg: self.of(word.value)}
        return found

    def name_of(self, node: ast.AST) -> str | None:
        """The dotted name of a function or class as it is imported: `trl.GRPOConfig`; `.name` for one of the script."""
        if isinstance(node, ast.Attribute):
            before = self.name_of(node.value)
            return None if before is None else f"{before}.{node.attr}"
        if not isinstance(node, ast.Name):
            return None
        bindings = self.program.bound(node.id, node)
        for binding in bindings:
            if imported := _imported(binding, node.id):
                return imported
        return f".{node.id}" if bindings else node.id


def _imported(binding: Binding, name: str) -> str:
    if isinstance(binding.node, ast.ImportFrom):
        [alias] = [each for each in binding.node.names if (each.asname or each.name) == name][:1]
        return f"{'.' * binding.node.level}{binding.node.module or ''}.{alias.name}"
    if isinstance(binding.node, ast.Import):
        return next(
            each.name if each.asname else name
            for each in binding.node.names
            if (each.asname or each.name.partition(".")[0]) == name
        )
    return ""


def _defaults(arguments: ast.arguments) -> dict[str, ast.expr]:
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    found = dict(zip(names[len(names) - len(arguments.defaults) :], arguments.defaults, strict=True))
    return found | {
        each.arg: usual for each, usual in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if usual is not None
    }


def _what(node: ast.AST) -> str:
    return "a loop" if isinstance(node, ast.ListComp | ast.DictComp | ast.GeneratorExp | ast.SetComp) else f"`{_short(node)}`"


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
