"""Fields of configurations that a Python program defines itself: arguments of argparse, dataclasses, and classes with constants.

Invariant: a field has the value of a start without arguments, and each default that a command line could replace is noted.
"""

import ast
from collections.abc import Iterator

from polyreme.import_config.scripts.names import Open, ScriptProgram
from polyreme.import_config.scripts.values import Values

PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
"""Parsers whose fields are those of dataclasses."""
_PARSING = (
    "parse_args",
    "parse_known_args",
    "parse_args_into_dataclasses",
    "parse_args_and_config",
    "parse",
    "parse_yaml_file",
    "parse_json_file",
    "parse_dict",
)


def field_of(values: Values, node: ast.Attribute) -> ast.expr:
    """The expression of `name.field`. Raises Open."""
    if isinstance(node.value, ast.Name) and (found := values.program.attributes.get(node.value.id)):
        changes = [each for each in found if each[0] in (node.attr, None)]
        if changes:
            raise Open(changes[0][2], f"`{node.value.id}.{node.attr}` is changed after its assignment")
    origin, item = values.origin(node.value)
    if isinstance(origin, ast.Name) and (definition := class_of(values, origin)) is not None and item is None:
        return _class_field(definition, node)
    if isinstance(origin, ast.Call):
        if _is_parsing(origin):
            return _parsed(values, origin, item, node)
        definition = class_of(values, origin.func)
        if definition is not None and item is None:
            return _instance_field(origin, definition, node)
    raise Open(node, f"`{ast.unparse(node)}`")


def class_of(values: Values, node: ast.expr) -> ast.ClassDef | None:
    """The class of the script that a name stands for."""
    if not isinstance(node, ast.Name):
        return None
    bindings = values.program.bound(node.id, node)
    return bindings[0].node if len(bindings) == 1 and isinstance(bindings[0].node, ast.ClassDef) else None


def parser_of(values: Values, call: ast.Call) -> ast.Call | None:
    """The construction of a parser of dataclasses, from the call of one of its methods."""
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in _PARSING:
        return None
    try:
        origin, _ = values.origin(call.func.value)
    except Open:
        return None
    if not isinstance(origin, ast.Call):
        return None
    return origin if (values.name_of(origin.func) or "").rpartition(".")[2] in PARSERS else None


def parsed_classes(parser: ast.Call) -> list[ast.expr]:
    """The classes of a parser of dataclasses, in order."""
    given = [*parser.args, *(word.value for word in parser.keywords if word.arg == "dataclass_types")][:1]
    return [each for first in given for each in (first.elts if isinstance(first, ast.Tuple | ast.List) else [first])]


def class_fields(definition: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Names and defaults of the fields of a dataclass, or the constants of a class."""
    for statement in definition.body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                if (usual := _default(value)) is not None:
                    yield name, usual
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value


def _is_parsing(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr in _PARSING


def _class_field(definition: ast.ClassDef, node: ast.Attribute) -> ast.expr:
    found = [value for name, value in class_fields(definition) if name == node.attr]
    if len(found) != 1:
        raise Open(node, f"`{ast.unparse(node)}`")
    return found[0]


def _instance_field(call: ast.Call, definition: ast.ClassDef, node: ast.Attribute) -> ast.expr:
    methods = {each.name for each in definition.body if isinstance(each, ast.FunctionDef)}
    if call.args or any(word.arg is None for word in call.keywords) or methods & {"__init__", "__post_init__", node.attr}:
        raise Open(node, f"`{ast.unparse(node)}`, which the class computes")
    given = [word.value for word in call.keywords if word.arg == node.attr]
    return given[0] if given else _class_field(definition, node)


def _parsed(values: Values, call: ast.Call, item: int | None, node: ast.Attribute) -> ast.expr:
    if any(not isinstance(each, ast.List) or each.elts for each in (*call.args, *(word.value for word in call.keywords))):
        raise Open(call, "arguments that the script gives to its parser")
    parser = parser_of(values, call)
    if parser is None:
        found = _argument(values, node)
    else:
        classes = parsed_classes(parser)
        definition = class_of(values, classes[item or 0]) if (item or 0) < len(classes) else None
        if definition is None:
            raise Open(node, f"`{ast.unparse(node)}`, which the command line or its YAML file gives")
        if any(
            isinstance(each, ast.FunctionDef) and each.name in ("__init__", "__post_init__", node.attr)
            for each in definition.body
        ):
            raise Open(definition, f"`{ast.unparse(node)}`, which the class computes")
        found = _class_field(definition, node)
    values.defaults[f"--{node.attr}"] = ast.unparse(found)
    return found


def _argument(values: Values, node: ast.Attribute) -> ast.expr:
    """The default of an option of argparse, as its type."""
    program = values.program
    options = [call for call in program.calls() if _destination(call) == node.attr]
    if len(options) != 1 or any(_sets_defaults(call) for call in program.calls()):
        raise Open(node, f"`{ast.unparse(node)}`, of which the script has {len(options)} options")
    words = {word.arg: word.value for word in options[0].keywords}
    action = words.get("action")
    if isinstance(action, ast.Constant) and action.value in ("store_true", "store_false") and "default" not in words:
        return _at(ast.Constant(action.value == "store_false"), options[0], program)
    usual = words.get("default")
    if usual is None:
        if (isinstance(required := words.get("required"), ast.Constant) and required.value) or not _has_dashes(options[0]):
            raise Open(options[0], f"`{ast.unparse(node)}`, which the command line gives")
        return _at(ast.Constant(None), options[0], program)
    kind = words.get("type")
    if kind is not None and isinstance(text := values.of(usual), str):  # argparse converts a default that is a text
        convert = {"int": int, "float": float, "str": str}.get(values.name_of(kind) or "")
        if convert is None:
            raise Open(options[0], f"a default that {ast.unparse(kind)} converts")
        return _at(ast.Constant(convert(text)), options[0], program)
    return usual


def _at(constant: ast.Constant, call: ast.Call, program: ScriptProgram) -> ast.Constant:
    program.places[constant] = program.places[call]
    return ast.copy_location(constant, call)


def _destination(call: ast.Call) -> str | None:
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
        return None
    if found := [word.value.value for word in call.keywords if word.arg == "dest" and isinstance(word.value, ast.Constant)]:
        return str(found[0])
    names = [each.value for each in call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    long = [name for name in names if name.startswith("--")] or names
    return long[0].lstrip("-").replace("-", "_") if long else None


def _has_dashes(call: ast.Call) -> bool:
    return any(isinstance(each, ast.Constant) and str(each.value).startswith("-") for each in call.args)


def _sets_defaults(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "set_defaults"


def _default(value: ast.expr) -> ast.expr | None:
    """The default in the declaration of a field."""
    if not isinstance(value, ast.Call) or ast.unparse(value.func).rpartition(".")[2] != "field":
        return value
    words = {word.arg: word.value for word in value.keywords}
    factory = words.get("default_factory")
    return factory.body if isinstance(factory, ast.Lambda) else words.get("default")
