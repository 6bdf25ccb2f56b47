"""The reward functions of a Python program's trainer: names of TRL's, modules, models, and functions that the script defines.

Invariant: every reward is in the values in the order of its weight. A script's function is never mistaken for TRL's of that name.
"""

import ast
from pathlib import Path

from polyreme.import_config.rules import Unresolved
from polyreme.import_config.scripts.names import Binding, Open, is_main_guard
from polyreme.import_config.scripts.parts import Found
from polyreme.import_config.scripts.values import Values

_OURS = ("trl.", "open_r1.rewards.")
_MODELS = "AutoModelForSequenceClassification.from_pretrained"


def rewards(found: Found, values: Values, node: ast.expr, file: Path) -> None:
    """`reward_funcs=`."""
    try:
        origin = node if _imported(values, node) else values.origin(node)[0]
    except Open as error:
        found.values["reward_funcs"] = Unresolved(str(error))
        found.notes.append(("reward_funcs", f"{error}: not known without running the script; write the rewards by hand"))
        return
    parts = origin.elts if isinstance(origin, ast.List | ast.Tuple) else [origin]
    named = [_reward(found, values, part, file) for part in parts]
    models = [name for kind, name in named if kind == "model"]
    found.values["reward_funcs"] = [name for kind, name in named if kind == "function"]
    if models:
        found.values["reward_model_name_or_path"] = models[0]
        _order_weights(found, [kind for kind, _ in named])
    if len(models) > 1:
        found.lose("reward_funcs", node, f"the reward models {', '.join(models[1:])}: add them to reward.rewards")


def _order_weights(found: Found, kinds: list[str]) -> None:
    """Weights in the order of TRL's command line, where the reward model is the first."""
    weights = found.values.get("reward_weights")
    if isinstance(weights, list) and len(weights) == len(kinds):
        first = kinds.index("model")
        rest = [weight for weight, kind in zip(weights, kinds, strict=True) if kind == "function"]
        found.values["reward_weights"] = [weights[first], *rest]


def _reward(found: Found, values: Values, node: ast.expr, file: Path) -> tuple[str, str]:
    """Kind and name of a reward."""
    if isinstance(node, ast.Name) and (function := _own(values, node)) is not None:
        found.functions.append(node.id)
        found.lose(node.id, function, _advice(values, function, node.id, file))
        return "function", node.id
    if name := _imported(values, node):
        return "function", f"trl.rewards.{name.rpartition('.')[2]}" if name.startswith(_OURS) else name
    try:
        origin, _ = values.origin(node)
        if isinstance(origin, ast.Call):
            return _call(found, values, origin)
        value: object = values.of(node)
        if isinstance(value, str):
            return "model", value
    except Open:
        pass  # said below, with the reward's own words
    words = ast.unparse(node)[:60]
    found.functions.append(words)
    found.lose(words, node, "a reward that is not known without running the script: write it as a file")
    return "function", words


def _imported(values: Values, node: ast.expr) -> str:
    """The dotted name of a function of another module; empty: it is none."""
    name = values.name_of(node) if isinstance(node, ast.Name | ast.Attribute) else None
    return name if name and "." in name and not name.startswith(".") else ""


def _call(found: Found, values: Values, call: ast.Call) -> tuple[str, str]:
    name = values.name_of(call.func) or ""
    last = name.rpartition(".")[2]
    if name.startswith(_OURS) and last.startswith("get_"):
        for key, value in values.keywords(call).items():
            found.values[{"ngram_size": "repetition_n_grams", "max_penalty": "repetition_max_penalty"}.get(key, key)] = value
        for key, part in zip(("max_completion_len", "soft_punish_cache"), call.args, strict=False):
            found.values[key] = values.of(part)
        return "function", f"trl.rewards.{last}"
    if name.endswith(_MODELS) and call.args and isinstance(path := values.of(call.args[0]), str):
        return "model", path
    raise Open(call, f"the call {name}(...)")


def _own(values: Values, node: ast.Name) -> ast.AST | None:
    """The function of the script that a name stands for."""
    for binding in values.program.bound(node.id, node):
        if isinstance(binding.node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_lambda(binding):
            return binding.node
    return None


def _is_lambda(binding: Binding) -> bool:
    return isinstance(binding.value, ast.Lambda)


def _advice(values: Values, function: ast.AST, name: str, file: Path) -> str:
    """What to do with a function of the script, as far as its parameters and its text say."""
    changes = []
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or not isinstance(
        values.program.places[function].scope, ast.Module
    ):
        changes.append("make it a function of a module")
    elif "completions" not in (parameters := _parameters(function)):
        changes.append(f"it has no parameter `completions`, but {', '.join(parameters) or 'none'}: see docs/rewards.md")
    if _reads_messages(function):
        changes.append('it reads messages (`["content"]`), but a completion is a text here')
    if _trains_on_import(values):
        changes.append("importing the script starts its training: put the function into a file of its own")
    what = "a reward of the script itself, which is not translated"
    ready = f"{{file: {file.name}, function: {name}}}"
    return (
        f"{what}; as {ready} in reward.rewards"
        f" {'it works if you change: ' + '; '.join(changes) if changes else 'it works unchanged'}"
    )


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


def _reads_messages(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value == "content"
        for node in ast.walk(function)
    )


def _trains_on_import(values: Values) -> bool:
    """Whether a trainer is made when the module is imported: at its top, not below `if __name__ == "__main__":`."""
    guarded = {id(inner) for node in values.program.tree.body if is_main_guard(node) for inner in ast.walk(node)}
    return any(
        (values.name_of(call.func) or "").endswith("Trainer")
        and isinstance(values.program.places[call].scope, ast.Module)
        and id(call) not in guarded
        for call in values.program.calls()
    )
