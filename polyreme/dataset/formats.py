"""Rows of other systems in our columns: prompt, answer, response, messages, chosen, rejected.

Invariant: a row keeps every column that has no counterpart here. Pure.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from shlex import quote

from polyreme.dataset.chat import read_answer, read_chat
from polyreme.dataset.columns import value_at
from polyreme.dataset.text_files import Fields
from polyreme.errors import DataError

_MISFITS = (LookupError, TypeError, ValueError, AttributeError)
"""Errors of a conversion for a row that is not of its format."""


@dataclass(frozen=True)
class Format:
    """The rows of one system.

    Attributes:
        name: name on the command line.
        columns: required columns of a row, by name or dotted path.
        to_ours: converts a row to our columns, which replace those in `columns` and `also`.
        also: optional columns of a row.
    """

    name: str
    columns: tuple[str, ...]
    to_ours: Callable[[Fields], dict[str, object]]
    also: tuple[str, ...] = ()


def _verl(row: Fields) -> dict[str, object]:
    return {"prompt": row["prompt"], "answer": row["reward_model"]["ground_truth"], "data_source": row["data_source"]}


def _paddlenlp(row: Fields) -> dict[str, object]:
    asked, told = ([each] if isinstance(each, str) else list(each) for each in (row["src"], row["tgt"]))
    if len(asked) == 1 and len(told) == 1:
        return {"prompt": asked[0], "answer": told[0]}
    if len(asked) - len(told) not in (0, 1):
        raise ValueError(f"{len(asked)} texts in src and {len(told)} in tgt, not as many or one fewer")
    turns = [{"role": role, "content": text} for both in zip(asked, told, strict=False) for role, text in _named(both)]
    if len(asked) == len(told) + 1:
        return {"prompt": [*turns, {"role": "user", "content": asked[-1]}]}
    return {"messages": turns}


def _named(both: tuple[str, str]) -> tuple[tuple[str, str], tuple[str, str]]:
    return ("user", both[0]), ("assistant", both[1])


def _instruction(row: Fields) -> object:
    """The prompt of an instruction: a text, or messages if LLaMA-Factory's columns have a system message or earlier turns."""
    asked = str(row["instruction"] + (f"\n{row['input']}" if row.get("input") else ""))
    turns = [("system", row["system"])] if row.get("system") else []
    turns += [turn for both in row.get("history") or () for turn in _named(both)]
    return [{"role": role, "content": text} for role, text in (*turns, ("user", asked))] if turns else asked


def _alpaca(row: Fields) -> dict[str, object]:
    return {"prompt": _instruction(row), "response": row["output"]}


def _alpaca_pair(row: Fields) -> dict[str, object]:
    return {"prompt": _instruction(row), "chosen": row["chosen"], "rejected": row["rejected"]}


def _human_assistant(row: Fields) -> dict[str, object]:
    """Anthropic's hh-rlhf: two whole dialogues as texts, which differ in the last answer."""
    mark = "\n\nAssistant:"
    prompt, found, chosen = row["chosen"].rpartition(mark)
    other, also_found, rejected = row["rejected"].rpartition(mark)
    if not (found and also_found):
        raise ValueError(f"an answer without {mark.strip()!r} before it, and no column with the prompt")
    if prompt != other:
        raise ValueError("two dialogues that differ before the last answer")
    return {"prompt": prompt + mark, "chosen": chosen, "rejected": rejected}


def _pair_of_messages(row: Fields) -> dict[str, object]:
    *asked, chosen = row["chosen"]
    *other, rejected = row["rejected"]
    if asked != other:
        raise ValueError("two conversations that differ before the last answer")
    return {"prompt": asked, "chosen": _told(chosen), "rejected": _told(rejected)}


def _told(answer: object) -> object:
    """An answer as text, or as a list of one message if it has more than a text."""
    found = read_answer(answer, "an answer")
    return found if isinstance(found, str) else [found]


def _completion(row: Fields) -> dict[str, object]:
    return {"prompt": row["prompt"], "response": _told(row["completion"])}


def _sharegpt(row: Fields) -> dict[str, object]:
    system = row.get("system")
    messages = list(read_chat(row["conversations"], "conversations").messages)
    return {"messages": [{"role": "system", "content": system}, *messages] if system else messages}


def _sharegpt_pair(row: Fields) -> dict[str, object]:
    return {"prompt": _sharegpt(row)["messages"], "chosen": _told(row["chosen"]), "rejected": _told(row["rejected"])}


def _question_pair(row: Fields) -> dict[str, object]:
    """Orca's pairs: a question, perhaps with a system message."""
    asked = {"role": "user", "content": row["question"]}
    prompt = [{"role": "system", "content": row["system"]}, asked] if row.get("system") else row["question"]
    return {"prompt": prompt, "chosen": _told(row["chosen"]), "rejected": _told(row["rejected"])}


FORMATS = (
    Format("verl", ("data_source", "prompt", "reward_model.ground_truth"), _verl),
    Format("paddlenlp", ("src", "tgt"), _paddlenlp),
    Format("sharegpt-pair", ("conversations", "chosen", "rejected"), _sharegpt_pair, ("system",)),
    Format("sharegpt", ("conversations",), _sharegpt, ("system",)),
    Format("alpaca", ("instruction", "output"), _alpaca, ("input", "system", "history")),
    Format("openrlhf", ("input", "label"), lambda row: {"prompt": row["input"], "answer": row["label"]}),
    Format("openrlhf-sft", ("input", "output"), lambda row: {"prompt": row["input"], "response": row["output"]}),
    Format("mindspeed", ("problem", "answer"), lambda row: {"prompt": row["problem"], "answer": row["answer"]}),
    Format("trl-completion", ("prompt", "completion"), _completion),
    Format("pairs", ("prompt", "chosen", "rejected"), dict),
    Format("alpaca-pair", ("instruction", "chosen", "rejected"), _alpaca_pair, ("input", "system", "history")),
    Format("orca-pair", ("question", "chosen", "rejected"), _question_pair, ("system",)),
    Format("trl-pair", ("chosen.0.role", "rejected.0.role"), _pair_of_messages),
    Format("hh-rlhf", ("chosen", "rejected"), _human_assistant),
    Format(
        "gsm8k",
        ("question", "answer"),
        lambda row: {"prompt": row["question"], "answer": row["answer"].rpartition("#### ")[2], "solution": row["answer"]},
    ),
    Format("ours", (), dict),
)
"""Every known format. The format of a row is the first one whose columns it has."""


def format_of(row: Fields) -> Format:
    """The format of a row, recognised by its columns."""
    missing = object()
    return next(each for each in FORMATS if all(value_at(row, key, missing) is not missing for key in each.columns))


def advice(row: Fields, column: str, where: str) -> str:
    """The command that writes a column which a row lacks; '' when none does."""
    kind = format_of(row)
    try:
        converted = {} if kind.to_ours is dict else kind.to_ours(row)
    except _MISFITS:
        return ""
    if not {column, "messages"} & converted.keys():
        return ""
    path = re.sub(r"(:| row | element )\d+( in line \d+)?$", "", where)
    return (
        f" The row has the form {kind.name}: `polyreme data convert {quote(str(path))} TARGET.jsonl` writes it with our columns."
    )


def to_ours(row: Fields, kind: Format, where: str) -> dict[str, object]:
    """A row of a format in our columns. Raises DataError: it is not of this format."""
    try:
        converted = kind.to_ours(row)
    except _MISFITS as error:
        raise DataError(
            f"a row of the format {kind.name} in {where}",
            f"no {error.expected}, but {error.found}" if isinstance(error, DataError) else f"{type(error).__name__}: {error}",
            "Fix the row, or name its --format.",
        ) from None
    replaced = {key.partition(".")[0] for key in (*kind.columns, *kind.also)}
    return {**converted, **{key: value for key, value in row.items() if key not in replaced and key not in converted}}
