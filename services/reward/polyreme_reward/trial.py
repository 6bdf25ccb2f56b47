"""`polyreme reward test`: responses from a file, scored exactly as a run would score them, as a table for people."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from polyreme.config.dataset_rows import label_text, lines_of
from polyreme.config.run import RewardConfig
from polyreme.errors import DataError
from polyreme_reward.build import open_rewards
from polyreme_reward.items import Item, Status
from polyreme_reward.metrics import Metrics
from polyreme_reward.scorer import BATCH_LIMIT, Part, Scored, Scorer

_TEXTS = ("prompt", "response", "response_raw", "label")
_WIDTH = 40


async def try_rewards(config: RewardConfig, path: Path, console: Console) -> int:
    """Scores a file of JSON lines and prints a row for each.

    Args:
        config: the rewards.
        path: JSON lines with `response` and, as the rewards need them, `prompt`, `response_raw`, `label` and any columns more.
        console: where the table goes.

    Returns:
        How many lines have no score.

    Raises:
        DataError: the file is missing or a line is not as above. ConfigError: a reward cannot be loaded.
    """
    items = list(read_items(path))
    metrics = Metrics()
    async with open_rewards(config, metrics) as rewards:
        scorer = Scorer(rewards, config.queue, metrics, config.choose_by)
        size = min(BATCH_LIMIT, config.queue)
        begin = time.perf_counter()
        answers = [a for start in range(0, len(items), size) for a in await scorer.score(items[start : start + size])]
        seconds = time.perf_counter() - begin
    console.print(_table(items, answers))
    scores = [answer.score for answer in answers if answer.status is Status.OK]
    failures = len(answers) - len(scores)
    mean = f"mean {sum(scores) / len(scores):.4g} of {len(scores)}" if scores else "no score"
    console.print(f"{mean}, {failures} without a score, {seconds:.2f} s", highlight=False)
    return failures


def read_items(path: Path) -> Iterator[Item]:
    """The items of a file of JSON lines; columns beyond the known ones are metadata. Raises DataError."""
    try:
        lines = lines_of(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"JSON lines in {path}", str(error), "Give a file with one JSON object on each line.") from None
    rows = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise DataError(f"JSON lines in {path}", "none", "Write one JSON object with a `response` on each line.")
    for number, line in rows:
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise DataError(f"a JSON object in {path}, line {number}", str(error), "Mend the line.") from None
        if not isinstance(row, dict) or "response" not in row:
            raise DataError(f"a JSON object with `response` in {path}, line {number}", line[:100], "Mend the line.")
        texts = {name: row.get(name, "") for name in _TEXTS}
        with suppress(TypeError):  # what cannot be one is told below
            texts["label"] = label_text(row.get("label"))
        columns = {name: value for name, value in row.items() if name == "prompt" or name not in _TEXTS}
        if odd := [name for name, text in texts.items() if not isinstance(text, str)]:
            raise DataError(f"text under {', '.join(odd)} in {path}, line {number}", line[:100], "Mend the line.")
        yield Item("", **texts, metadata_json=json.dumps(columns) if columns else "")


def _table(items: list[Item], answers: list[Scored]) -> Table:
    names = list(dict.fromkeys(part.name for answer in answers for part in answer.parts))
    table = Table("line", "status", "score", *names, "response", "label or message")
    for number, (item, answer) in enumerate(zip(items, answers, strict=True), 1):
        parts = {part.name: shown_part(part) for part in answer.parts}
        scored = answer.status is Status.OK
        table.add_row(
            str(number),
            answer.status.name,
            f"{answer.score:.4g}" if scored else "",
            *(parts.get(name, "") for name in names),
            _short(item.response),
            _short(item.label) if scored else answer.message,
        )
    return table


def shown_part(part: Part) -> str:
    """A part's raw value; where its weight is not 1, the weighted one behind it."""
    return f"{part.raw:.4g}" if part.weighted == part.raw else f"{part.raw:.4g} ({part.weighted:.4g})"


def _short(text: str) -> str:
    line = text.replace("\n", " ")
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."
