"""The names of a Python program: where each is bound, and which binding a use of it sees.

Invariant: a binding is found only if it is the name's only one and runs before use; else `Open` says why. Nothing is executed.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
Blocks = tuple[tuple[ast.AST, str], ...]
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_WHY = {
    ast.If: "a condition",
    ast.For: "a loop",
    ast.While: "a loop",
    ast.Try: "a `try`",
    ast.TryStar: "a `try`",
    ast.AsyncFor: "a loop",
    ast.Match: "a condition",
}
_CHANGING = frozenset(("append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "sort", "reverse", "add"))


class Open(Exception):
    """What is not known without running the program.

    Attributes:
        node: the expression or statement that decides.
        why: what it is: a call, a condition.
    """

    def __init__(self, node: ast.AST, why: str):
        super().__init__(why)
        self.node, self.why = node, why

    def __str__(self) -> str:
        return f"line {getattr(self.node, 'lineno', '?')}: {self.why}"


@dataclass(frozen=True)
class Place:
    """A node's scope, and the blocks in it that run only sometimes, from the outside to the inside."""

    scope: Scope
    blocks: Blocks


@dataclass(frozen=True)
class Binding:
    """What gives a name its value.

    Attributes:
        node: the statement, parameter or imported name.
        value: the expression that is assigned; None: there is none.
        item: which element of the value, for `a, b = value`.
        why: why a binding without a value is open.
    """

    node: ast.AST
    value: ast.expr | None = None
    item: int | None = None
    why: str = ""


@dataclass
class ScriptProgram:
    """A program with its names.

    Attributes:
        places: of every node.
        bindings: of every name, by scope and name.
        changed: names of lists and mappings that are changed later, with the statement.
        attributes: assignments `name.attribute = value`, by name, in the program's order. An attribute of None is unknown.
    """

    tree: ast.Module
    places: dict[ast.AST, Place] = field(default_factory=dict)
    bindings: dict[tuple[Scope, str], list[Binding]] = field(default_factory=dict)
    changed: dict[str, ast.AST] = field(default_factory=dict)
    attributes: dict[str, list[tuple[str | None, ast.expr, ast.AST]]] = field(default_factory=dict)

    def calls(self) -> Iterator[ast.Call]:
        """All calls, in the order of their lines."""
        found = [node for node in self.places if isinstance(node, ast.Call)]
        yield from sorted(found, key=lambda node: (node.lineno, node.col_offset))

    def bound(self, name: str, use: ast.AST) -> list[Binding]:
        """All bindings of a name in the nearest scope that has one."""
        place = self.places[use]
        while True:
            if found := self.bindings.get((place.scope, name)):
                return found
            if isinstance(place.scope, ast.Module):
                return []
            place = self.places[place.scope]

    def binding(self, name: str, use: ast.AST) -> Binding:
        """The single binding that a use sees. Raises Open if there is none or several, or if it may not have run."""
        found = self.bound(name, use)
        if not found:
            raise Open(use, f"`{name}`, which the script does not define")
        if len(found) > 1 and (step := self._step(found, name, use)) is not None:
            found = [step]
        if len(found) > 1:
            lines = ", ".join(str(getattr(each.node, "lineno", "?")) for each in found)
            raise Open(use, f"`{name}` is assigned in lines {lines}")
        here = self.places[found[0].node]
        place = self.places[use]
        inner = place.scope is not here.scope
        while place.scope is not here.scope:
            place = self.places[place.scope]
        if place.blocks[: len(here.blocks)] != here.blocks:
            block = here.blocks[-1][0]
            raise Open(block, f"`{name}` depends on {_WHY.get(type(block), 'a block')}")
        if not inner and found[0].node.lineno > use.lineno:  # type: ignore[attr-defined]
            raise Open(found[0].node, f"`{name}` is assigned after its use")
        if name in self.changed:
            raise Open(self.changed[name], f"`{name}` is changed after its assignment")
        return found[0]

    def _step(self, found: list[Binding], name: str, use: ast.AST) -> Binding | None:
        """The binding that a use sees among those of `x = f(); x = g(x)`: each step reads the one before it, and all run."""
        first = self.places[found[0].node]
        line = use.lineno  # type: ignore[attr-defined]
        if self.places[use].scope is not first.scope:
            return None
        for each in found:
            if each.value is None or self.places[each.node] != first:
                return None
            if each is not found[0] and not any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(each.value)):
                return None
        before = [each for each in found if each.node.end_lineno < line]  # type: ignore[attr-defined]
        return before[-1] if before else None

    def always_before(self, node: ast.AST, use: ast.AST) -> bool:
        """Whether a statement runs once before a use in the same scope."""
        here, there = self.places[node], self.places[use]
        same = here.scope is there.scope and there.blocks[: len(here.blocks)] == here.blocks
        return same and node.lineno < use.lineno  # type: ignore[attr-defined]


def read_program(text: str) -> ScriptProgram:
    """The names of a program's text. Raises SyntaxError or ValueError as `ast.parse` does."""
    program = ScriptProgram(ast.parse(text))
    _walk(program, program.tree, Place(program.tree, ()))
    aliases = list(_aliases(program))
    for _ in aliases:
        for new, old in aliases:
            if new in program.changed:
                program.changed.setdefault(old, program.changed[new])
    return program


def _aliases(program: ScriptProgram) -> Iterator[tuple[str, str]]:
    """Pairs of a name and the name whose object it stands for, by assignment or as a parameter of a function of the program."""
    functions = {node.name: node for node in program.places if isinstance(node, ast.FunctionDef)}
    for node in program.places:
        match node:
            case ast.Assign(targets=targets, value=ast.Name(id=old)):
                yield from ((target.id, old) for target in targets if isinstance(target, ast.Name))
            case ast.Call(func=ast.Name(id=name), args=given, keywords=words) if name in functions:
                parameters = [each.arg for each in functions[name].args.args]
                yield from ((new, each.id) for new, each in zip(parameters, given, strict=False) if isinstance(each, ast.Name))
                yield from ((word.arg, word.value.id) for word in words if word.arg and isinstance(word.value, ast.Name))


def is_main_guard(node: ast.AST) -> bool:
    """Whether this is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _walk(program: ScriptProgram, node: ast.AST, place: Place) -> None:
    program.places[node] = place
    for binding, name in _bindings(node):
        scope = _owner(program, name, place)
        program.bindings.setdefault((scope, name), []).append(binding)
    _note_changes(program, node)
    for part, child in _children(node):
        if part in ("cases", "handlers"):
            _walk(program, child, Place(place.scope, (*place.blocks, (child, part))))
        elif isinstance(node, _SCOPES) and part in ("body", "args"):
            _walk(program, child, Place(node, ()))
        elif type(node) in _WHY and part in ("body", "orelse") and not is_main_guard(node):
            _walk(program, child, Place(place.scope, (*place.blocks, (node, part))))
        else:
            _walk(program, child, place)


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for part, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(
                child, ast.expr_context | ast.operator | ast.cmpop | ast.boolop | ast.unaryop
            ):
                yield part, child


def _owner(program: ScriptProgram, name: str, place: Place) -> Scope:
    """The scope whose name a statement binds: the module for names that a function declares as global."""
    body = place.scope.body if isinstance(place.scope, ast.FunctionDef | ast.AsyncFunctionDef) else []
    declared = [each for each in body if isinstance(each, ast.Global | ast.Nonlocal) and name in each.names]
    return program.tree if declared else place.scope


def _bindings(node: ast.AST) -> Iterator[tuple[Binding, str]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _targets(node, target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _targets(node, target, value)
        case ast.AugAssign(target=ast.Name(id=name)):
            yield Binding(node, why="an assignment with an operator"), name
        case ast.NamedExpr(target=ast.Name(id=name)):
            yield Binding(node, why="an assignment within an expression"), name
        case ast.For(target=target) | ast.AsyncFor(target=target):
            yield from ((Binding(node, why="a loop"), name) for name in _names(target))
        case ast.withitem(optional_vars=ast.expr() as target):
            yield from ((Binding(target, why="a `with`"), name) for name in _names(target))
        case ast.Delete(targets=targets):
            yield from (
                (Binding(node, why="a deletion"), name)
                for target in targets
                if isinstance(target, ast.Name)
                for name in [target.id]
            )
        case ast.ExceptHandler(name=str() as name) | ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name):
            yield Binding(node, why="a condition"), name
        case ast.Import() | ast.ImportFrom():
            for alias in node.names:
                yield Binding(node), alias.asname or alias.name.partition(".")[0]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield Binding(node), name
        case ast.arg(arg=name):
            yield Binding(node), name


def _targets(node: ast.AST, target: ast.expr, value: ast.expr) -> Iterator[tuple[Binding, str]]:
    if isinstance(target, ast.Name):
        yield Binding(node, value), target.id
    elif isinstance(target, ast.Tuple | ast.List):
        whole = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        for item, each in enumerate(target.elts):
            if not isinstance(each, ast.Name):
                yield from ((Binding(node, why="an assignment to several names"), name) for name in _names(each))
            elif whole:
                yield Binding(node, value.elts[item]), each.id  # type: ignore[attr-defined]
            else:
                yield Binding(node, value, item), each.id


def _names(target: ast.AST) -> Iterator[str]:
    yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))


def _note_changes(program: ScriptProgram, node: ast.AST) -> None:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attribute)) if attribute in _CHANGING:
            program.changed.setdefault(name, node)
        case ast.Call(func=ast.Name(id="setattr"), args=[ast.Name(id=name), what, value]):
            known = what.value if isinstance(what, ast.Constant) and isinstance(what.value, str) else None
            program.attributes.setdefault(name, []).append((known, value, node))
        case ast.Subscript(
            value=ast.Attribute(attr="environ"), slice=ast.Constant(value=str() as name), ctx=ast.Store() | ast.Del()
        ):
            program.changed.setdefault(f"${name}", node)
        case ast.Subscript(value=ast.Name(id="environ"), slice=ast.Constant(value=str() as name), ctx=ast.Store() | ast.Del()):
            program.changed.setdefault(f"${name}", node)
        case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
            program.changed.setdefault(name, node)
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name), attr=attribute)], value=value):
            program.attributes.setdefault(name, []).append((attribute, value, node))
        case ast.AugAssign(target=ast.Attribute(value=ast.Name(id=name), attr=attribute)):
            program.attributes.setdefault(name, []).append((attribute, ast.BinOp(node.target, node.op, node.value), node))
