"""A trainer's arguments that are objects in a Python program: model, data, adapters and rewards, under TRL's command-line keys.

Invariant: what an object says is in the values, and what cannot be known is in the notes, each with its line.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyreme.import_config.rules import Unresolved
from polyreme.import_config.scripts.names import Open
from polyreme.import_config.scripts.values import Values

TEXTS = ("model_name_or_path", "dataset_name", "output_dir", "run_name")
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
         "modules_to_save": "lora_modules_to_save", "use_rslora": "use_rslora", "use_dora": "use_dora",
         "task_type": "lora_task_type", "target_parameters": "lora_target_parameters"}  # fmt: skip
_LORA_DEFAULTS = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""PEFT's defaults. Those of TRL's command line differ."""
_UNSLOTH = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"}
"""Unsloth's defaults."""
_MODEL = {"revision": "model_revision", "torch_dtype": "dtype", "dtype": "dtype", "load_in_4bit": "load_in_4bit",
          "load_in_8bit": "load_in_8bit"}  # fmt: skip
_DATA = {"name": "dataset_config", "split": "dataset_train_split", "streaming": "dataset_streaming"}
_FILES = ("json", "csv", "parquet", "text")
_COLUMNS = ("remove_columns", "select_columns", "cast_column", "with_format", "set_format")


@dataclass
class Found:
    """What a script says.

    Attributes:
        values: by TRL's key.
        notes: what cannot be carried over or known, with the words that it is about.
        functions: rewards that the script defines.
    """

    values: dict[str, object] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)

    def open(self, key: str, error: Open) -> None:
        """A key whose value is not known without running the script."""
        if key in TEXTS:
            self.notes.append((key, f"{error}: not known without running the script"))
        else:
            self.values[key] = Unresolved(str(error))

    def lose(self, words: str, node: ast.AST, why: str) -> None:
        self.notes.append((words, f"line {getattr(node, 'lineno', '?')}: {why}"))


def set_options(found: Found, values: Values, call: ast.Call, names: Mapping[str, str], rest: str) -> None:
    """Sets the keyword arguments of a call under their keys; others become `rest.NAME`, or the name itself without `rest`."""
    for word in call.keywords:
        if word.arg is not None:
            _set_option(found, values, names.get(word.arg, f"{rest}{word.arg}"), word.value)
            continue
        try:
            mapping = values.of(word.value)
        except Open as error:
            found.notes.append((f"**{ast.unparse(word.value)}", f"{error}: its options are not known without running the script"))
            continue
        for name, value in mapping.items():
            found.values[names.get(name, f"{rest}{name}")] = value


def _set_option(found: Found, values: Values, key: str, node: ast.expr) -> None:
    if isinstance(node, ast.Dict) and all(isinstance(name, ast.Constant) for name in node.keys):
        for name, value in zip(node.keys, node.values, strict=True):
            _set_option(found, values, f"{key}.{name.value}", value)  # type: ignore[union-attr]
        return
    try:
        found.values[key] = values.of(node)
    except Open as error:
        found.open(key, error)


def model(found: Found, values: Values, node: ast.expr) -> None:
    """`model=`: a name, or a call of `from_pretrained`, perhaps with adapters."""
    try:
        origin, item = values.origin(node)
        while (
            isinstance(origin, ast.Call)
            and isinstance(origin.func, ast.Attribute)
            and origin.func.attr in ("to", "cuda", "bfloat16")
        ):
            origin, item = values.origin(origin.func.value)
        if isinstance(origin, ast.Call) and item in (None, 0):
            return _model_call(found, values, origin)
        found.values["model_name_or_path"] = _text(values, node)
    except Open as error:
        found.open("model_name_or_path", error)


def _model_call(found: Found, values: Values, call: ast.Call) -> None:
    name = values.name_of(call.func) or ""
    last = name.rpartition(".")[2]
    words = {word.arg: word.value for word in call.keywords}
    if last == "get_peft_model":
        if (inner := next(iter(call.args), words.get("model"))) is not None:
            model(found, values, inner)
        if len(call.args) > 1 or "peft_config" in words:
            adapters(found, values, call.args[1] if len(call.args) > 1 else words["peft_config"])
        else:  # FastLanguageModel.get_peft_model(model, r=16, ...)
            _lora(found, values, ast.Call(call.func, [], [word for word in call.keywords if word.arg != "model"]), _UNSLOTH)
        return
    if last != "from_pretrained":
        found.values["model_name_or_path"] = _text(values, call)
        return
    where = next(iter(call.args), None) or words.get("pretrained_model_name_or_path") or words.get("model_name")
    if where is not None:
        try:
            found.values["model_name_or_path"] = _text(values, where)
        except Open as error:
            found.open("model_name_or_path", error)
    options = [
        word
        for word in call.keywords
        if word.arg not in ("pretrained_model_name_or_path", "model_name", "quantization_config", "max_seq_length")
    ]
    if "FastLanguageModel" in name or "FastModel" in name:
        found.values["load_in_4bit"] = True  # Unsloth's default
    set_options(found, values, ast.Call(call.func, [], options), _MODEL, "model_init_kwargs.")
    if "quantization_config" in words:
        _quantised(found, values, words["quantization_config"])


def _quantised(found: Found, values: Values, node: ast.expr) -> None:
    try:
        origin, _ = values.origin(node)
        options = values.keywords(origin) if isinstance(origin, ast.Call) else {"load_in_4bit": True} if values.of(origin) else {}
    except Open:
        options = {"load_in_4bit": True}  # whatever its numbers are
    found.values |= {key: value for key, value in options.items() if key in ("load_in_4bit", "load_in_8bit")}


def adapters(found: Found, values: Values, node: ast.expr) -> None:
    """`peft_config=`."""
    try:
        origin, _ = values.origin(node)
        if isinstance(origin, ast.Constant) and origin.value is None:
            return
        if not isinstance(origin, ast.Call) or (values.name_of(origin.func) or "").rpartition(".")[2] != "LoraConfig":
            raise Open(origin, f"`{ast.unparse(origin)[:60]}`")
    except Open as error:
        found.notes.append(("peft_config", f"{error}: not known without running the script; here all weights are trained"))
        return
    _lora(found, values, origin, {})


def _lora(found: Found, values: Values, call: ast.Call, usual: Mapping[str, object]) -> None:
    found.values["use_peft"] = True
    found.values |= _LORA_DEFAULTS | {_LORA[key]: value for key, value in usual.items()}
    set_options(found, values, call, _LORA, "peft_config.")
    if len(call.args):
        found.lose("LoraConfig", call, "arguments without a name")


def data(found: Found, values: Values, node: ast.expr) -> None:
    """`train_dataset=`: a call of `load_dataset`, perhaps with changes of its rows."""
    try:
        _rows(found, values, node)
    except Open as error:
        found.notes.append(("train_dataset", f"{error}: not known without running the script; name a file in data.train"))


def _rows(found: Found, values: Values, node: ast.expr) -> None:
    origin, item = values.origin(node)
    if item is not None:
        raise Open(origin, "one of several results")
    if isinstance(origin, ast.Subscript):
        split = values.of(origin.slice)
        if not isinstance(split, str):
            raise Open(origin, f"`{ast.unparse(origin)[:60]}`")
        _rows(found, values, origin.value)
        found.values["dataset_train_split"] = split
        return
    if not isinstance(origin, ast.Call):
        raise Open(origin, f"`{ast.unparse(origin)[:60]}`")
    name = values.name_of(origin.func) or ""
    if name.rpartition(".")[2] == "load_dataset":
        return _load(found, values, origin)
    if isinstance(origin.func, ast.Attribute) and not name.startswith("datasets."):
        _rows(found, values, origin.func.value)
        return _change(found, values, origin)
    raise Open(origin, f"the call {ast.unparse(origin.func)}(...)")


def _load(found: Found, values: Values, call: ast.Call) -> None:
    words = {word.arg: word.value for word in call.keywords}
    first = call.args[0] if call.args else words.get("path")
    if first is None:
        raise Open(call, "load_dataset without a name")
    name: object = _text(values, first)
    if name in _FILES and "data_files" in words:
        name = values.of(words["data_files"])
        if isinstance(name, dict):
            name = name.get("train")
    found.values["dataset_name"] = name
    if len(call.args) > 1:
        _set_option(found, values, "dataset_config", call.args[1])
    kept = [
        word
        for word in call.keywords
        if word.arg not in ("path", "data_files", "trust_remote_code", "num_proc", "token", "cache_dir")
    ]
    for word in kept:
        if word.arg in _DATA:
            _set_option(found, values, _DATA[word.arg], word.value)
        else:
            found.lose("load_dataset", call, f"`{word.arg or '**'}` chooses other rows: prepare the file of data.train")


def _change(found: Found, values: Values, call: ast.Call) -> None:
    """A change of rows."""
    assert isinstance(call.func, ast.Attribute)
    method = call.func.attr
    if method in _COLUMNS:
        return
    if method == "rename_column" and len(call.args) == 2:
        old, new = (values.of(each) for each in call.args)
        if new == "prompt":
            found.values["dataset_prompt_column"] = old
            return
    found.lose(
        f"train_dataset.{method}",
        call,
        f"`.{method}(...)` changes the rows or their order: write the result to the file of data.train",
    )


def _text(values: Values, node: ast.expr) -> str:
    value = values.of(node)
    if not isinstance(value, str):
        raise Open(node, f"`{ast.unparse(node)[:60]}`, which is no text")
    return value
