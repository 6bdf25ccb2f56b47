"""Names and signatures of an unpacked Python package, read from its source. Nothing is imported, so any version of Python works."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Node = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Parameters:
    """The parameters of a callable. `open`: it accepts any keyword."""

    names: tuple[str, ...]
    open: bool


class PackageSource:
    """The source below `root`, which contains the top-level packages."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cache  # noqa: B019 - lives as long as its test
    def module(self, name: str) -> ast.Module | None:
        """The module's tree; None when there is no such file."""
        base = self.root.joinpath(*name.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return ast.parse(path.read_text())
        return None

    def find(self, module: str, name: str, depth: int = 8) -> tuple[str, Node] | str | None:
        """The origin of `name` in `module`: (defining module, definition), the name of a module, or None."""
        if self.module(f"{module}.{name}") is not None:
            return f"{module}.{name}"
        tree = self.module(module)
        if tree is None or not depth:
            return None
        is_package = (self.root.joinpath(*module.split(".")) / "__init__.py").is_file()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign) and any(isinstance(each, ast.Name) and each.id == name for each in node.targets):
                return module, node
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                source = self._source(module, is_package, node)
                for alias in node.names:
                    if alias.name == "*" and (found := self.find(source, name, depth - 1)):
                        return found
                    if (alias.asname or alias.name) == name and (found := self.find(source, alias.name, depth - 1)):
                        return found
        return None

    def parameters(self, module: str, definition: Node) -> Parameters:
        """The parameters of a function, or of the construction of a class, with those of its base classes."""
        if isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
            return _of_function(definition)
        if not isinstance(definition, ast.ClassDef):
            return Parameters((), open=True)
        for node in definition.body:
            if isinstance(node, ast.FunctionDef) and node.name in (
                "__init__",
                "forward" if _is_autograd(definition) else "__init__",
            ):
                own = _of_function(node)
                return Parameters(own.names[1:], own.open)
        names = [
            node.target.id for node in definition.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        for base in definition.bases:
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if isinstance(found, tuple):
                names = [*self.parameters(*found).names, *names]
        return Parameters(tuple(names), open=False)

    def has_method(self, module: str, definition: Node, name: str) -> bool:
        """Whether a class or one of its bases has the method. Of a base outside the package (torch's Module), only `forward` is known."""
        if not isinstance(definition, ast.ClassDef):
            return True
        if any(isinstance(node, ast.FunctionDef) and node.name == name for node in definition.body):
            return True
        for base in definition.bases:
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if self.has_method(*found, name) if isinstance(found, tuple) else name == "forward":
                return True
        return False

    @staticmethod
    def _source(module: str, is_package: bool, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        base = parts[: len(parts) - node.level + is_package]
        return ".".join([*base, *([node.module] if node.module else [])])


def _is_autograd(definition: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Attribute) and base.attr == "Function" for base in definition.bases)


def _of_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Parameters:
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return Parameters(tuple(names), open=arguments.kwarg is not None)


@dataclass(frozen=True)
class Call:
    """A call of an imported name in our source: where, the keywords, and how many positional arguments."""

    where: str
    name: str
    keywords: tuple[str, ...]
    positional: int


def calls(path: Path, names: set[str]) -> list[Call]:
    """The calls of `names` in a file, by their last part. Unpacked arguments are not counted."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
            if name in names:
                keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
                positional = sum(not isinstance(argument, ast.Starred) for argument in node.args)
                found.append(Call(f"{path.name}:{node.lineno}", name, keywords, positional))
    return found


def definitions_of(path: Path, names: set[str]) -> list[tuple[str, str, str]]:
    """(class, base, method) for each method that a file's class defines and whose base is one of `names`; including constructors and new
    methods."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in names]
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef) and each.name != "__init__"]
            found += [(node.name, base, method) for base in bases for method in methods]
    return found


def fields_of(package: PackageSource, module: str, name: str) -> dict[str, None]:
    """The annotated fields of a class, in order."""
    found = package.find(module, name)
    assert isinstance(found, tuple) and isinstance(found[1], ast.ClassDef)
    nodes = [node for node in found[1].body if isinstance(node, ast.AnnAssign)]
    return {node.target.id: None for node in nodes if isinstance(node.target, ast.Name)}


def methods_of(package: PackageSource, module: str, name: str) -> dict[str, set[str]]:
    """The parameters of each method of a class."""
    found = package.find(module, name)
    assert isinstance(found, tuple) and isinstance(found[1], ast.ClassDef), f"no {module}.{name}"
    methods = [node for node in found[1].body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: {each.arg for each in (*node.args.args, *node.args.kwonlyargs)} for node in methods}
