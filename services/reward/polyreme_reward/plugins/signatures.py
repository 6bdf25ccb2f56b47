"""The signatures of reward functions, recognised by their parameter names.

Invariant: a function is called with exactly the parameters that it has. A function that fits no signature is refused when it is
loaded, not at the first item.

| convention | parameters                                                          | one call is | texts                  |
|------------|---------------------------------------------------------------------|-------------|------------------------|
| polyreme   | any of prompt, templated_prompt, response[_raw], messages, label,   | an item     | as named               |
|            | metadata, token_ids, token_texts, item                              |             |                        |
| paddlenlp  | solution_str, ground_truth[, query]                                 | an item     | with special tokens    |
| verl       | data_source, solution_str, ground_truth[, extra_info]               | an item     | without special tokens |
| verl-batch | data_sources, solution_strs, ground_truths[, extra_infos]           | a list      | without special tokens |
| openrlhf   | queries[, prompts][, labels]                                        | a list      | with special tokens    |
| trl        | completions[, completion_ids][, prompts][, trainer_state, log_*]    | a list      | without special tokens |
|            | [, dataset columns]                                                 |             |                        |

Lists have one element, since items are isolated from each other. The reward's `options` supply further parameters. `prompt` is
plain text, and `templated_prompt` is the text that the model saw. As in the original systems, PaddleNLP's `query` and OpenRLHF's
`queries` and `prompts` include the template, and TRL's `prompts` do not.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polyreme.errors import ConfigError
from polyreme_reward.items import NO_TOKENS, Item, RewardError

LABEL_NAMES = (
    "label",
    "labels",
    "answer",
    "answers",
    "solution",
    "solutions",
    "ground_truth",
    "ground_truths",
    "target",
    "targets",
)
_OURS: dict[str, Callable[[Item], object]] = {
    "prompt": lambda item: item.prompt,
    "templated_prompt": lambda item: item.seen,
    "response": lambda item: item.response,
    "response_raw": lambda item: item.raw,
    "messages": lambda item: item.messages,
    "label": lambda item: item.label,
    "metadata": lambda item: item.metadata,
    "token_ids": lambda item: list(_tokens(item).token_ids),
    "token_texts": lambda item: list(_with_texts(item).token_texts),
    "item": lambda item: item,
}
_TOKEN_NAMES = frozenset({"token_ids", "token_texts", "item", "completion_ids"})


def _tokens(item: Item) -> Item:
    """Returns the item. Raises RewardError when it has no tokens."""
    if not item.token_ids:
        raise RewardError(NO_TOKENS)
    return item


def _with_texts(item: Item) -> Item:
    """Returns the item. Raises RewardError when it has no texts of its tokens."""
    if len(_tokens(item).token_texts) != len(item.token_ids):
        raise RewardError(f"expected {len(item.token_ids)} token_texts, one per token; found {len(item.token_texts)}")
    return item


@dataclass(frozen=True)
class Adapted:
    """A function with its convention.

    Args:
        call: returns the answer for an item, or a coroutine.
        unwrap: returns the number, list or mapping in an answer.
        reads_tokens: whether the function takes the response's tokens.
    """

    convention: str
    call: Callable[[Item], object]
    unwrap: Callable[[object], object]
    reads_tokens: bool = False


def adapt(function: Callable[..., object], options: Mapping[str, object]) -> Adapted:
    """Adapts a reward function with any known signature.

    Raises:
        ConfigError: the parameters fit no signature, or the function has no parameter for an option.
    """
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"a reward function {function.__name__} that returns a score", "a generator", "Use `return` instead of `yield`."
        )
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = {p.name for p in parameters if p.default is p.empty and p.name in names}
    if positional := [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]:
        raise _misfit(function, f"positional-only parameters {positional}")
    if strangers := [name for name in options if name not in names and not takes_any]:
        raise ConfigError(f"options of {function.__name__} ({', '.join(names)})", ", ".join(strangers), "Fix `options`.")
    wanted = [name for name in names if name not in options]
    if "completions" in names:
        return _trl(function, wanted, required - set(options), takes_any, options)
    convention, sources, listed = _convention(names)
    sources = {name: source for name, source in sources.items() if name in wanted}
    if missing := required - set(sources) - set(options):
        raise _misfit(function, f"the unknown parameters {sorted(missing)}")

    def call(item: Item) -> object:
        arguments = {name: source(item) for name, source in sources.items()}
        if listed:
            arguments = {name: [value] for name, value in arguments.items()}
        return _score(function(**arguments, **options))

    unwrap = _unwrap_openrlhf if convention == "openrlhf" else _first if listed else _same
    return Adapted(convention, call, unwrap, bool(_TOKEN_NAMES & sources.keys()))


def _convention(names: list[str]) -> tuple[str, dict[str, Callable[[Item], object]], bool]:
    """The name of the convention, its parameters, and whether they are lists."""
    if "queries" in names:
        query = {"queries": lambda item: item.seen + item.raw, "prompts": lambda item: item.seen}
        return "openrlhf", {**query, "labels": lambda item: item.label}, True
    if "solution_strs" in names:
        return "verl-batch", {f"{name}s": source for name, source in _verl().items()}, True
    if "data_source" in names or "extra_info" in names:
        return "verl", _verl(), False
    if "solution_str" in names:
        texts = {"solution_str": lambda item: item.raw, "ground_truth": lambda item: item.label}
        return "paddlenlp", {**texts, "query": lambda item: item.seen}, False
    return "polyreme", _OURS, False


def _verl() -> dict[str, Callable[[Item], object]]:
    def extra_info(item: Item) -> object:
        metadata = item.metadata
        return metadata.get("extra_info", metadata)

    return {
        "data_source": lambda item: item.metadata.get("data_source", ""),
        "solution_str": lambda item: item.response,
        "ground_truth": lambda item: item.label,
        "extra_info": extra_info,
    }


def _trl(
    function: Callable[..., object], wanted: list[str], required: set[str], takes_any: bool, options: Mapping[str, object]
) -> Adapted:
    special = {"prompt", "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}

    def call(item: Item) -> object:
        columns = item.metadata
        for name in LABEL_NAMES:
            columns.setdefault(name, item.label)
        given: dict[str, object] = {"prompts": [item.prompt], "completions": [item.response]}
        given |= {"trainer_state": None, "log_extra": _ignore, "log_metric": _ignore}
        if item.token_ids or "completion_ids" in required:
            given["completion_ids"] = [list(_tokens(item).token_ids)]
        for name in list(columns) if takes_any else wanted:
            if name in columns and name not in special and name not in options:
                given[name] = [columns[name]]
        if absent := required - given.keys():
            raise RewardError(f"expected the columns {sorted(absent)} in the row; found {sorted(item.metadata)}")
        return _score(function(**{name: value for name, value in given.items() if takes_any or name in wanted}, **options))

    return Adapted("trl", call, _first, "completion_ids" in wanted)


def _score(answer: object) -> object:
    """Returns the answer. Raises RewardError for a generator, which an event loop would mistake for a coroutine."""
    if inspect.isgenerator(answer) or inspect.isasyncgen(answer):
        raise RewardError("expected a score or a coroutine; found a generator. Use `return` instead of `yield`")
    return answer


def _ignore(*_: object, **__: object) -> None:
    """Replaces TRL's logging hooks. The service reports a reward's numbers as its parts."""


def _same(answer: object) -> object:
    return answer


def _first(answer: object) -> object:
    """The element of a list, array or tensor of length 1, also for the `score` of a mapping."""
    if isinstance(answer, Mapping):
        return {name: _first(value) if name == "score" else value for name, value in answer.items()}
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if isinstance(answer, list | tuple):
        if len(answer) != 1:
            raise RewardError(f"expected a list of one score for a list of one item; found {len(answer)} scores")
        return answer[0]
    return answer


def _unwrap_openrlhf(answer: object) -> object:
    """The answer in OpenRLHF's {"rewards", "scores", "extra_logs"}, or in a plain list or tensor of rewards."""
    if not isinstance(answer, Mapping):
        return _first(answer)
    if "rewards" not in answer:
        raise RewardError(f"expected a mapping with the key 'rewards'; found the keys {sorted(map(str, answer))[:10]}")
    extras = {name: _first(values) for name, values in (answer.get("extra_logs") or {}).items()}
    if answer.get("scores") is not None:
        extras["scores"] = _first(answer["scores"])
    return {**extras, "score": _first(answer["rewards"])}


def _misfit(function: Callable[..., object], found: str) -> ConfigError:
    return ConfigError(
        "a reward function with parameters among (prompt, templated_prompt, response, response_raw, messages, label, metadata, "
        "token_ids, token_texts, item), or with PaddleNLP's, verl's, OpenRLHF's or TRL's signature",
        f"{getattr(function, '__name__', function)} with {found}",
        "Rename the parameters, or set them in `options`. The reference answer is `label`, any other column of the row"
        " metadata['COLUMN'].",
    )
