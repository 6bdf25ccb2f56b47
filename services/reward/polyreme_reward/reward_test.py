"""`polyreme reward test` scores the responses of a file and prints what each reward returns.

Invariant: a reward gets the same texts and columns here as in a run, except the templated prompt, which is empty unless the file
has it. Names, numbers and messages are printed completely on any terminal width.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from polyreme.config.reward import RewardConfig
from polyreme.dataset.chat import plain_prompt, read_prompt
from polyreme.dataset.columns import label_text, value_at
from polyreme.dataset.source import read_objects
from polyreme.dataset.strict_json import messages_of
from polyreme.dataset.text_files import Fields
from polyreme.errors import DataError
from polyreme_reward.build import open_rewards
from polyreme_reward.items import Item, Status
from polyreme_reward.metrics import RewardMetrics
from polyreme_reward.scorer import BATCH_LIMIT, Part, Scored, Scorer

_TEXTS = ("response", "response_raw", "templated_prompt")
_TOKENS = ("token_ids", "token_texts")
_WIDTH = 100


async def test_rewards(config: RewardConfig, path: Path, console: Console, columns: tuple[str, str] = ("prompt", "label")) -> int:
    """Scores a data file and prints a table with one row per item.

    Args:
        config: the rewards.
        path: data file with `response` and, if the rewards need them, `response_raw`, `templated_prompt`, `token_ids` with
            `token_texts`, and a run's columns.
        console: where to print the table.
        columns: names of the prompt and label columns.

    Returns:
        The number of lines without a score.

    Raises:
        DataError: the file is missing, or a line is invalid.
        ConfigError: a reward cannot be loaded.
    """
    items = list(read_items(path, columns))
    metrics = RewardMetrics()
    async with open_rewards(config, metrics) as rewards:
        scorer = Scorer(rewards, config.queue, metrics, config.choose_by, config.choices)
        size = min(BATCH_LIMIT, config.queue)
        begin = time.perf_counter()
        answers = [a for start in range(0, len(items), size) for a in await scorer.score(items[start : start + size])]
        seconds = time.perf_counter() - begin
    for line in shown_lines(items, answers):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    scores = [answer.score for answer in answers if answer.status is Status.OK]
    failures = len(answers) - len(scores)
    mean = f"mean {sum(scores) / len(scores):.4g} of {len(scores)}" if scores else "no score"
    console.print(f"{mean}, {failures} without a score, {seconds:.2f} s", highlight=False)
    return failures


def read_items(path: Path, columns: tuple[str, str] = ("prompt", "label")) -> Iterator[Item]:
    """Yields the items of a data file. As in a run, all columns except response and label are metadata. Raises DataError."""
    for where, row in read_objects(path):
        yield _item(row, where, columns)


def _item(row: Fields, where: str, columns: tuple[str, str]) -> Item:
    if "response" not in row:
        raise DataError(f"a row with `response` in {where}", f"columns {sorted(row)}", "Add the column.")
    missing = object()
    prompt_key, label_key = (
        name if value_at(row, name, missing) is not missing else usual
        for name, usual in zip(columns, ("prompt", "label"), strict=True)
    )
    texts = {name: row.get(name, "") for name in _TEXTS}
    prompt = value_at(row, prompt_key, missing)
    what = f"{prompt_key!r} in {where}"
    texts["prompt"] = (
        "" if prompt is missing else prompt if prompt == "" else plain_prompt(read_prompt(messages_of(prompt, what), what))
    )
    try:
        label = label_text(value_at(row, label_key))
    except TypeError as error:
        raise DataError(f"text under {label_key} in {where}", str(error), "Fix the line.") from None
    if odd := [name for name, text in texts.items() if not isinstance(text, str)]:
        raise DataError(f"text under {', '.join(odd)} in {where}", f"{dict(row)!r:.100}", "Fix the line.")
    ids, words = (row.get(name, []) for name in _TOKENS)
    fits = isinstance(ids, list) and isinstance(words, list) and len(ids) == len(words)
    if not fits or [type(each) for each in (*ids, *words)] != [int] * len(ids) + [str] * len(words):
        raise DataError(
            f"token_ids (numbers) and token_texts (texts) of one length in {where}", f"{dict(row)!r:.100}", "Fix the line."
        )
    metadata = {name: value for name, value in row.items() if name not in (*_TEXTS, *_TOKENS, label_key)}
    packed = json.dumps(metadata) if metadata else ""
    return Item("", **texts, label=label or None, metadata_json=packed, token_ids=tuple(ids), token_texts=tuple(words))


def shown_lines(items: Sequence[Item], answers: Sequence[Scored]) -> Iterator[str]:
    """Each item's number, status, score and parts, aligned; below it the response, and the label or why there is no score."""
    rows = [
        {"score": f"{answer.score:.4g}" if answer.status is Status.OK else "none"}
        | {part.name: shown_part(part) for part in answer.parts}
        for answer in answers
    ]
    widths = {name: max(len(row.get(name, "")) for row in rows) for name in dict.fromkeys(name for row in rows for name in row)}
    for number, (item, answer, row) in enumerate(zip(items, answers, rows, strict=True), 1):
        numbers = "  ".join(f"{name} {row.get(name, ''):<{width}}" for name, width in widths.items())
        yield f"{number:<4} {answer.status.name:<8} {numbers}".rstrip()
        yield f"     response {_short(item.response)}"
        yield f"     label    {_short(item.label or '')}" if answer.status is Status.OK else f"     message  {answer.message}"


def shown_part(part: Part) -> str:
    """A part's raw value, followed by the weighted value in parentheses when they differ."""
    return f"{part.raw:.4g}" if part.weighted == part.raw else f"{part.raw:.4g} ({part.weighted:.4g})"


def _short(text: str) -> str:
    line = text.replace("\n", " ")
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."
