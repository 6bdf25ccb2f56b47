"""Reward functions of five conventions get the arguments that they expect."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from polyreme.errors import ConfigError
from polyreme_reward.items import Item, RewardError, outcome_of
from polyreme_reward.plugins.signatures import adapt

METADATA = '{"data_source": "sums", "level": 2, "extra_info": {"split": "train"}}'
ITEM = Item("key", "1+2=", "3", "3<eos>", "3", METADATA, templated_prompt="Q: 1+2=")


def score(function: Callable[..., Any], item: Item = ITEM, **options: Any) -> tuple[str, Any]:
    adapted = adapt(function, options)
    return adapted.convention, outcome_of(adapted.unwrap(adapted.call(item)))


def ours(response: str, label: str) -> float:
    return float(response == label)


def ours_whole(item: Item) -> float:
    return float(item.response_raw == "3<eos>")


def ours_everything(
    prompt: str, templated_prompt: str, response: str, response_raw: str, label: str, metadata: dict[str, Any], bonus: float = 0.0
) -> float:
    texts = (prompt, templated_prompt, response, response_raw, label, metadata["level"])
    return float(texts == ("1+2=", "Q: 1+2=", "3", "3<eos>", "3", 2)) + bonus


def paddlenlp(
    solution_str: str, ground_truth: str, query: str | None = None, format_reward: float = 1, answer_reward: float = 1.0
) -> float:
    return float((solution_str, ground_truth, query) == ("3<eos>", "3", "Q: 1+2=")) * answer_reward


def verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    return {
        "score": float((data_source, solution_str, ground_truth, extra_info) == ("sums", "3", "3", {"split": "train"})),
        "acc": 1.0,
    }


def verl_batch(
    data_sources: list[str], solution_strs: list[str], ground_truths: list[str], extra_infos: list[Any]
) -> list[float]:
    return [float((data_sources, solution_strs, ground_truths) == (["sums"], ["3"], ["3"]))]


def openrlhf(queries: list[str], prompts: list[str], labels: list[str], **kwargs: Any) -> dict[str, Any]:
    right = float((queries, prompts, labels) == (["Q: 1+2=3<eos>"], ["Q: 1+2="], ["3"]))
    return {"rewards": np.array([right]), "scores": np.array([right / 2]), "extra_logs": {"length": np.array([4.0])}}


def openrlhf_bare(queries: list[str]) -> np.ndarray:
    return np.array([float(queries == ["Q: 1+2=3<eos>"])])


def trl(prompts: list[str], completions: list[str], level: list[int], solution: list[str], **kwargs: Any) -> list[float]:
    return [float((prompts, completions, level, solution) == (["1+2="], ["3"], [2], ["3"]))]


def trl_hooks(completions: list[str], trainer_state: Any, log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    log_metric("accuracy", 1.0)
    log_extra("answer", completions)
    return [float(kwargs["answer"] == ["3"])]


@pytest.mark.parametrize(
    ("function", "convention"),
    [
        (ours, "polyreme"),
        (ours_whole, "polyreme"),
        (ours_everything, "polyreme"),
        (paddlenlp, "paddlenlp"),
        (verl, "verl"),
        (verl_batch, "verl-batch"),
        (openrlhf, "openrlhf"),
        (openrlhf_bare, "openrlhf"),
        (trl, "trl"),
        (trl_hooks, "trl"),
    ],
)
def test_each_convention_gets_its_arguments(function: Callable[..., Any], convention: str) -> None:
    found, outcome = score(function)
    assert found == convention
    assert outcome.value == 1.0, outcome


def test_named_numbers_come_along() -> None:
    assert score(verl)[1].extras == {"acc": 1.0}
    assert score(openrlhf)[1].extras == {"scores": 0.5, "length": 4.0}


def test_options_are_arguments() -> None:
    assert score(paddlenlp, answer_reward=2.5)[1].value == 2.5
    assert score(ours_everything, bonus=1.0)[1].value == 2.0


def test_an_option_without_a_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match="bonus"):
        adapt(ours, {"bonus": 1.0})


def two_lists(prompts: list[str], answers: list[str]) -> list[float]:
    return [1.0]


def wants_more(response: str, temperature: float) -> float:
    return temperature


def positional(response: str, /) -> float:
    return 1.0


@pytest.mark.parametrize("function", [two_lists, wants_more, positional])
def test_a_function_that_fits_nothing_is_refused_at_load(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=function.__name__):
        adapt(function, {})


def test_an_option_may_fill_a_parameter() -> None:
    assert score(wants_more, temperature=0.5)[1].value == 0.5


def short(queries: list[str]) -> list[float]:
    return []


def long(completions: list[str]) -> list[float]:
    return [1.0, 2.0]


def unnamed(queries: list[str]) -> dict[str, Any]:
    return {"reward": [1.0]}


@pytest.mark.parametrize(("function", "found"), [(short, "found 0 scores"), (long, "found 2 scores"), (unnamed, "'rewards'")])
def test_a_list_of_the_wrong_length_is_an_error(function: Callable[..., Any], found: str) -> None:
    with pytest.raises(RewardError, match=found):
        score(function)


def test_a_missing_column_is_an_error() -> None:
    with pytest.raises(RewardError, match="level"):
        score(trl, Item("", "p", "3"))


def test_without_a_template_the_plain_prompt_stands_for_the_templated_one() -> None:
    item = ITEM._replace(templated_prompt="")
    assert adapt(lambda prompt, templated_prompt: prompt == templated_prompt == "1+2=", {}).call(item) is True


def yields(response: str) -> Any:
    yield 1.0


async def yields_asynchronously(response: str) -> Any:
    yield 1.0


@pytest.mark.parametrize("function", [yields, yields_asynchronously])
def test_a_generator_function_is_refused_at_load(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="yield"):
        adapt(function, {})


def test_a_generator_as_answer_is_an_error() -> None:
    with pytest.raises(RewardError, match="generator"):
        adapt(lambda response: (number for number in [1.0]), {}).call(ITEM)
    with pytest.raises(RewardError, match="generator"):
        adapt(lambda completions: (number for number in [1.0]), {}).call(ITEM)


TOKENS = ITEM._replace(token_ids=(9, 1), token_texts=("3", "<eos>"))


def per_token(token_ids: list[int], token_texts: list[str]) -> list[float]:
    return [float(pair in ((9, "3"), (1, "<eos>"))) for pair in zip(token_ids, token_texts, strict=True)]


def trl_ids(completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    return [float(completion_ids == [[9, 1]])]


@pytest.mark.parametrize(("function", "value"), [(per_token, 2.0), (trl_ids, 1.0)])
def test_functions_that_read_tokens_get_them_or_fail(function: Callable[..., Any], value: float) -> None:
    adapted = adapt(function, {})
    assert adapted.reads_tokens
    assert outcome_of(adapted.unwrap(adapted.call(TOKENS)), 2).value == value
    with pytest.raises(RewardError, match="tokens"):
        adapted.call(ITEM)


def test_most_functions_read_no_tokens() -> None:
    assert not any(adapt(function, {}).reads_tokens for function in (ours, paddlenlp, verl, verl_batch, openrlhf, trl))
    assert adapt(ours_whole, {}).reads_tokens


def test_ids_whose_texts_are_missing_are_an_error_of_a_function_that_reads_texts() -> None:
    with pytest.raises(RewardError, match="2 token_texts"):
        adapt(per_token, {}).call(TOKENS._replace(token_texts=()))


@pytest.mark.parametrize(
    "source",
    [
        "def reward(response, label): return float(label is None)",
        "def reward(item): return float(item.label is None)",
        "def reward(solution_str, ground_truth): return float(ground_truth is None)",
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return float(ground_truth is None)",
        "def scores(data_sources, solution_strs, ground_truths): return [float(ground_truths == [None])]",
        "def reward_func(queries, prompts, labels): return [float(labels == [None])]",
        "def reward(completions, answer): return [float(answer == [None])]",
        "def reward(completions, **columns): return [float(columns['solution'] == [None])]",
    ],
)
def test_a_missing_label_is_none_in_every_signature(source: str) -> None:
    names: dict[str, Any] = {}
    exec(source, names)
    (function,) = (value for name, value in names.items() if name != "__builtins__")
    adapted = adapt(function, {})
    assert adapted.unwrap(adapted.call(Item("", "q", "r"))) == 1.0
