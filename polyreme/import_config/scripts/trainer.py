"""A Python program with TRL's GRPOTrainer or RLOOTrainer, read as the values of TRL's command line.

Invariant: each argument of the trainer and of its configuration is in the values or in the notes. A program whose configuration
comes from a command line, or of another trainer, is refused with what to do. Nothing is executed.
"""

import ast
from pathlib import Path

from polyreme.errors import ConfigError
from polyreme.import_config.reading.read import Read, text_of_file
from polyreme.import_config.rules import flatten
from polyreme.import_config.scripts.fields import class_fields, class_of, field_of, parsed_classes, parser_of
from polyreme.import_config.scripts.names import Open, read_program
from polyreme.import_config.scripts.parts import Found, adapters, data, model, set_options
from polyreme.import_config.scripts.rewards import rewards
from polyreme.import_config.scripts.values import Values

TRAINED = ("GRPO", "RLOO")
_MODULES = ("trl.", "open_r1.", "unsloth.")
_INIT = "Write its run with `polyreme init` and "
_OTHERS = {
    "SFT": "Use `polyreme sft` (docs/stages.md), whose configuration is written by hand.",
    "DPO": "Use `polyreme dpo` (docs/stages.md), whose configuration is written by hand.",
    "KTO": "Use `polyreme dpo` with loss.kind: kto (docs/stages.md).",
    "ORPO": "Use `polyreme dpo` with loss.kind: orpo (docs/stages.md).",
    "CPO": "Use `polyreme dpo` with loss.kind: simpo (docs/stages.md).",
    "Reward": "Use `polyreme reward-model` (docs/stages.md), whose configuration is written by hand.",
    "PPO": f"{_INIT}algorithm.preset: ppo.",
    "PPOv2": f"{_INIT}algorithm.preset: ppo.",
    "GKD": f"{_INIT}algorithm.preset: distillation.",
    "OnlineDPO": "Polyreme has no preferences between answers of the policy itself: train on the same rewards with"
    " algorithm.preset: grpo.",
    "XPO": "Polyreme has no preferences between answers of the policy itself: train on the same rewards with"
    " algorithm.preset: grpo.",
    "NashMD": "Polyreme has no preferences between answers of the policy itself: train on the same rewards with"
    " algorithm.preset: grpo.",
}
_POSITIONS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class", "reward_processing_classes",
              "callbacks", "optimizers", "peft_config", "tools", "rollout_func", "environment_factory")  # fmt: skip
_TOKENIZERS = ("processing_class", "reward_processing_classes", "tokenizer")
_CHOOSE = "Name a script with one GRPOTrainer or RLOOTrainer, or the YAML file of `trl grpo`."


def read_script(path: Path) -> Read:
    """Reads a script.

    Raises:
        ConfigError: no Python, no trainer that can be imported, or a configuration that only its start gives.
    """
    try:
        values = Values(read_program(text_of_file(path)), field_of)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"a Python script at {path}", str(error), _CHOOSE) from None
    trainers = [(call, kind) for call in values.program.calls() if (kind := _kind(values, call.func, "Trainer"))]
    kinds = [kind for _, kind in trainers]
    chosen = next(((call, kind) for call, kind in trainers if kind in TRAINED), None)
    if chosen is None:
        raise _refused(values, kinds, path)
    call, kind = chosen
    found = Found()
    _note_others(found, values, call, trainers)
    _read_trainer(found, values, call, kind, path)
    if values.defaults:
        names = ", ".join(f"{name}: {value}" for name, value in values.defaults.items())
        found.notes.append(
            ("defaults", f"CHECK: the command line or the environment decides on {names}; these defaults were read")
        )
    plain = {key: value for name, given in found.values.items() for key, value in flatten(given, name)}
    if found.functions:
        plain["(functions)"] = tuple(found.functions)
    return Read(plain, found.notes, f"trl {kind.lower()}")


def _kind(values: Values, node: ast.expr, suffix: str) -> str | None:
    """`GRPO` for GRPOTrainer, and for a class of the script that is derived from it."""
    name = values.name_of(node) or ""
    definition = class_of(values, node)
    if definition is not None:
        return next((kind for base in definition.bases if (kind := _kind(values, base, suffix))), None)
    last = name.rpartition(".")[2]
    kind = last.removesuffix(suffix)
    return kind if last != kind and kind in (*TRAINED, *_OTHERS) else None


def _refused(values: Values, kinds: list[str], path: Path) -> ConfigError:
    for kind in kinds:
        return ConfigError(f"GRPOTrainer or RLOOTrainer in {path}", f"{kind}Trainer", _OTHERS[kind])
    return ConfigError(f"GRPOTrainer or RLOOTrainer in {path}", "a Python script without one", _CHOOSE)


def _note_others(found: Found, values: Values, chosen: ast.Call, trainers: list[tuple[ast.Call, str]]) -> None:
    for call, kind in trainers:
        if call is not chosen:
            what = "only the first GRPOTrainer or RLOOTrainer is read" if kind in TRAINED else _OTHERS[kind]
            found.lose(f"{kind}Trainer", call, f"the script also trains with it: {what}")
    definition = class_of(values, chosen.func)
    if definition is not None:
        methods = ", ".join(each.name for each in definition.body if isinstance(each, ast.FunctionDef))
        found.lose(
            definition.name, definition, f"a trainer of the script's own, whose methods are not translated: {methods or 'none'}"
        )
    name = values.name_of(chosen.func) or ""
    if definition is None and not name.startswith(_MODULES):
        found.lose(name, chosen, "a trainer of another module than TRL's, which may train otherwise")
    for (_, variable), bindings in values.program.bindings.items():
        if any(binding.value is chosen for binding in bindings):
            for attribute, _, statement in values.program.attributes.get(variable, []):
                found.lose(f"{variable}.{attribute or '?'}", statement, "the trainer is changed after it is made; it is not read")
    blocks = values.program.places[chosen].blocks
    if blocks:
        line = getattr(blocks[-1][0], "lineno", "?")
        found.lose("trainer", chosen, f"line {line} decides whether or how often it is made")


def _read_trainer(found: Found, values: Values, call: ast.Call, kind: str, path: Path) -> None:
    given = dict(zip(_POSITIONS, call.args, strict=False))
    for word in call.keywords:
        if word.arg is not None:
            given[word.arg] = word.value
        else:
            _spread(found, values, given, word.value)
    if len(call.args) > len(_POSITIONS) or any(isinstance(each, ast.Starred) for each in call.args):
        found.lose("trainer", call, "arguments with *, which are not read")
    _config(found, values, given.get("args"), kind, path)
    for name, node in given.items():
        match name:
            case "model":
                model(found, values, node)
            case "reward_funcs":
                rewards(found, values, node, path)
            case "train_dataset":
                data(found, values, node)
            case "peft_config":
                adapters(found, values, node)
            case "eval_dataset":
                found.values["eval_dataset"] = ast.unparse(node)[:60]
            case "tools" | "rollout_func" | "environment_factory":
                if not (isinstance(node, ast.Constant) and node.value is None):
                    found.values[name] = ast.unparse(node)[:60]
            case "callbacks" | "optimizers":
                _own_parts(found, values, name, node)
            case _ if name not in ("args", *_TOKENIZERS):
                found.lose(name, node, "an argument of the trainer that this importer does not know")


def _spread(found: Found, values: Values, given: dict[str, ast.expr], node: ast.expr) -> None:
    """`**arguments` of a trainer."""
    try:
        origin, _ = values.origin(node)
        if not isinstance(origin, ast.Dict):
            raise Open(origin, f"`**{ast.unparse(node)[:60]}`")
        for key, value in zip(origin.keys, origin.values, strict=True):
            given[str(values.of(key)) if key is not None else "**"] = value
    except Open as error:
        found.notes.append((f"**{ast.unparse(node)[:60]}", f"{error}: its arguments are not known without running the script"))


def _own_parts(found: Found, values: Values, name: str, node: ast.expr) -> None:
    try:
        if not any(values.of(node) or []):
            return
    except Open:
        pass  # the words of the loss are the expression itself
    what = (
        "callbacks can change the training: see docs/notices.md"
        if name == "callbacks"
        else "the optimizer of trainer.optimizer is used"
    )
    found.lose(name, node, f"{ast.unparse(node)[:60]}: {what}")


def _config(found: Found, values: Values, node: ast.expr | None, kind: str, path: Path) -> None:
    """`args=`: the call of GRPOConfig or RLOOConfig, with what is assigned to its attributes."""
    if node is None or (isinstance(node, ast.Constant) and node.value is None):
        return
    call = _config_call(found, values, node, path)
    definition = class_of(values, call.func)
    if definition is not None:
        for name, value in class_fields(definition):
            set_options(found, values, ast.Call(call.func, [], [ast.keyword(name, value)]), {}, "")
        if methods := [each.name for each in definition.body if isinstance(each, ast.FunctionDef)]:
            found.lose(definition.name, definition, f"its methods can change options: {', '.join(methods)}")
    if call.args:
        set_options(found, values, ast.Call(call.func, [], [ast.keyword("output_dir", call.args[0])]), {}, "")
    if len(call.args) > 1:
        found.lose(f"{kind}Config", call, "arguments without a name after the first, which are not read")
    set_options(found, values, call, {}, "")
    passed: list[ast.Name] = []
    values.origin(node, passed)
    for variable in reversed(passed):
        _assigned(found, values, variable)
    for statement in values.program.places:
        match statement:
            case ast.Assign(targets=[ast.Attribute(value=ast.Attribute(attr="args"), attr=attribute)]):
                found.lose(f"args.{attribute}", statement, "the configuration is changed in the trainer; it is not read")


def _config_call(found: Found, values: Values, node: ast.expr, path: Path) -> ast.Call:
    known = [call for call in values.program.calls() if _kind(values, call.func, "Config") in TRAINED]
    try:
        origin, item = values.origin(node)
    except Open as error:
        raise ConfigError(
            f"one configuration of the trainer in {path}", str(error), "Write one of them into a script, and import that."
        ) from None
    if isinstance(origin, ast.Call):
        if _kind(values, origin.func, "Config") in TRAINED and item is None:
            return origin
        parser = parser_of(values, origin)
        if parser is not None:
            return _parsed_config(values, parser, item, origin, path)
    if len(known) == 1:
        found.lose(
            "args",
            origin,
            f"`{ast.unparse(origin)[:60]}`; the only configuration of the script is read, that of line {known[0].lineno}",
        )
        return known[0]
    raise ConfigError(
        f"one GRPOConfig or RLOOConfig in {path}",
        f"{len(known)}; args is {ast.unparse(origin)[:60]}",
        "Write the configuration into the script, and import that.",
    )


def _parsed_config(values: Values, parser: ast.Call, item: int | None, call: ast.Call, path: Path) -> ast.Call:
    """The defaults of a configuration that a parser fills. Raises ConfigError if the script has none of them."""
    classes = parsed_classes(parser)
    definition = class_of(values, classes[item or 0]) if (item or 0) < len(classes) else None
    if definition is None or call.args:
        raise ConfigError(
            f"the values of the training in {path}",
            f"a parser (line {parser.lineno}): they come from a command line or its YAML file",
            "Import that YAML file, or the shell script that starts this one with its options.",
        )
    for name, value in class_fields(definition):
        values.defaults[f"--{name}"] = ast.unparse(value)
    made = ast.copy_location(ast.Call(classes[item or 0], [], []), call)
    values.program.places[made] = values.program.places[call]
    return made


def _assigned(found: Found, values: Values, name: ast.Name) -> None:
    """Attributes of the configuration that the script sets later, and functions of the script that could set them."""
    for attribute, value, statement in values.program.attributes.get(name.id, []):
        if values.program.bound(name.id, statement) is not values.program.bound(name.id, name):
            continue  # another variable of the same name
        if attribute is None or not values.program.always_before(statement, name):
            found.lose(f"{name.id}.{attribute or '?'}", statement, "set in a condition, a loop or a function; it is not read")
        else:
            set_options(found, values, ast.Call(name, [], [ast.keyword(attribute, value)]), {}, "")
    for call in values.program.calls():
        for place, argument in enumerate(call.args):
            if isinstance(argument, ast.Name) and argument.id == name.id and isinstance(call.func, ast.Name):
                _note_function(found, values, call, place)


def _note_function(found: Found, values: Values, call: ast.Call, place: int) -> None:
    assert isinstance(call.func, ast.Name)
    for binding in values.program.bound(call.func.id, call):
        if isinstance(binding.node, ast.FunctionDef) and place < len(binding.node.args.args):
            parameter = binding.node.args.args[place].arg
            for attribute, _, statement in values.program.attributes.get(parameter, []):
                if values.program.places[statement].scope is binding.node:
                    found.lose(
                        f"{parameter}.{attribute or '?'}",
                        statement,
                        f"`{binding.node.name}` changes the configuration; it is not read",
                    )
