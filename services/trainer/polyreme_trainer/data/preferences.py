"""Preference rows of a stage: pairs of answers to one prompt, and single answers that are good or bad.

Invariant: both answers of a pair follow the same prompt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from polyreme.config.data import Sources
from polyreme.config.stage import ConversationData, PairData, PreferenceData, RewardModelConfig
from polyreme.dataset.chat import Answer, Chat, PromptSource, plain_prompt, read_answer, read_chat
from polyreme.dataset.columns import value_at
from polyreme.dataset.source import name_of, read_objects
from polyreme.errors import DataError
from polyreme_trainer.data.prompts import Example, chunks, column, each_or_blame, prompt_in, structured, tools_in
from polyreme_trainer.data.stage_rows import Encoded, StageRows, assemble, examples_of
from polyreme_trainer.data.template import Template

Encode = Callable[[Template, Sequence[PromptSource], Sequence[Answer]], list[Example]]


@dataclass(frozen=True)
class Judged:
    """A prompt with its answers (the chosen one of a pair first) and the row's numbers."""

    where: str
    prompt: PromptSource
    answers: tuple[Answer, ...]
    columns: Mapping[str, float] = field(default_factory=dict)


def read_scored_pairs(sources: Sources, config: RewardModelConfig, template: Template, limit: int | None = None) -> StageRows:
    """The pairs of a reward model: whole conversations, `margin` and `tie`.

    A pair of equal answers is a tie. `ties: skip` omits ties.

    Args:
        limit: maximum number of rows to read; None: all.

    Raises:
        DataError: the file is missing or empty, or a row is unusable.
    """
    data, left_out = config.data, {"ties": 0}

    def judged() -> Iterator[Judged]:
        for where, fields in islice(read_objects(sources), limit):
            prompt, answers = _pair(fields, where, data)
            tie = answers[0] == answers[1] or (data.tie_key is not None and _flag(fields, data.tie_key, where, "data.tie_key"))
            margin = 0.0 if data.margin_key is None else _number(fields, data.margin_key, where)
            if tie and config.ties == "skip":
                left_out["ties"] += 1
            else:
                yield Judged(where, prompt, answers, {"margin": margin, "tie": float(tie)})

    return _assemble(judged(), sources, data, template, _whole, left_out)


def read_pairs(sources: Sources, data: PreferenceData, template: Template, limit: int | None = None) -> StageRows:
    """The pairs of a preference loss: both answers are trained on. Arguments and errors as `read_scored_pairs`."""
    rows = (Judged(where, *_pair(fields, where, data)) for where, fields in islice(read_objects(sources), limit))
    return _assemble(rows, sources, data, template, examples_of)


def read_labelled(sources: Sources, data: PreferenceData, template: Template, limit: int | None = None) -> StageRows:
    """The answers of KTO with the column `good`. Arguments and errors as `read_scored_pairs`; one row alone is also an error."""

    def judged() -> Iterator[Judged]:
        for where, fields in islice(read_objects(sources), limit):
            prompt, what = prompt_in(fields, where, data), f"{data.response_key!r} in {where}"
            answer = read_answer(structured(column(fields, data.response_key, where, "data.response_key"), what, data), what)
            yield Judged(where, prompt, (answer,), {"good": float(_flag(fields, data.label_key, where, "data.label_key"))})

    rows = _assemble(judged(), sources, data, template, examples_of)
    if len(rows) < 2:  # with its own answer as the baseline, every loss would be half its weight
        raise DataError(
            f"two or more rows in {name_of(sources)}", "one", "Add rows: kto pairs each prompt with another row's answer."
        )
    return rows


def _assemble(
    rows: Iterator[Judged],
    sources: Sources,
    data: ConversationData,
    template: Template,
    encode: Encode,
    left_out: Mapping[str, int] | None = None,
) -> StageRows:
    def encode_rows(some: Sequence[Judged]) -> list[list[Example]]:
        prompts = [row.prompt for row in some for _ in row.answers]
        examples = iter(encode(template, prompts, [answer for row in some for answer in row.answers]))
        return [[next(examples) for _ in row.answers] for row in some]

    def encoded() -> Iterator[Encoded]:
        for some in chunks(rows):
            for row, examples in zip(some, each_or_blame(encode_rows, some), strict=True):
                yield Encoded(row.where, examples, row.columns)

    return assemble(encoded(), sources, data, template, left_out)


def _whole(template: Template, prompts: Sequence[PromptSource], responses: Sequence[Answer]) -> list[Example]:
    return [Example(ids, np.ones(len(ids), dtype=np.uint8)) for ids in template.encode_whole(prompts, responses)]


def _pair(fields: Mapping[str, object], where: str, data: PairData) -> tuple[PromptSource, tuple[Answer, Answer]]:
    """The prompt and both answers. Answers of several messages are whole conversations, which differ in their last message; then
    the prompt column may be absent, and otherwise has the same prompt (UltraFeedback)."""
    chosen, rejected = (
        structured(column(fields, key, where, setting), f"{key!r} in {where}", data)
        for key, setting in ((data.chosen_key, "data.chosen_key"), (data.rejected_key, "data.rejected_key"))
    )
    if not all(isinstance(each, list) and len(each) > 1 for each in (chosen, rejected)):
        answers = [
            read_answer(value, f"{key!r} in {where}") for value, key in ((chosen, data.chosen_key), (rejected, data.rejected_key))
        ]
        return prompt_in(fields, where, data), (answers[0], answers[1])
    one, other = (
        read_chat(value, f"{key!r} in {where}", tools_in(fields, data))
        for value, key in ((chosen, data.chosen_key), (rejected, data.rejected_key))
    )
    if one.messages[:-1] != other.messages[:-1]:
        raise DataError(
            f"{data.chosen_key!r} and {data.rejected_key!r} with the same messages before the answer in {where}",
            "other messages",
            "Fix the row.",
        )
    prompt = Chat(one.messages[:-1], one.tools)
    if value_at(fields, data.prompt_key) is not None:
        _check_same(prompt_in(fields, where, data), prompt, where, data)
    first, second = (
        read_answer(each.messages[-1], f"the last message of {key!r} in {where}")
        for each, key in ((one, data.chosen_key), (other, data.rejected_key))
    )
    return prompt, (first, second)


def _check_same(given: PromptSource, prompt: Chat, where: str, data: PairData) -> None:
    """Raises DataError when a row's prompt is not the one in its conversations. A text is the last user message."""
    same = given.messages == prompt.messages if isinstance(given, Chat) and given.tools is None else None
    if not (same or plain_prompt(given).strip() == plain_prompt(prompt).strip()):
        raise DataError(
            f"in {data.prompt_key!r} the prompt that {data.chosen_key!r} and {data.rejected_key!r} begin with in {where}",
            f"{plain_prompt(given)!r:.80}",
            "Fix the row, or write only the answers into both columns.",
        )


def _flag(fields: Mapping[str, object], key: str, where: str, setting: str) -> bool:
    value = column(fields, key, where, setting)
    if value not in (True, False):
        raise DataError(f"true or false in {key!r} in {where}", f"{value!r:.80}", "Fix the row.")
    return bool(value)


def _number(fields: Mapping[str, object], key: str, where: str) -> float:
    value = column(fields, key, where, "data.margin_key")
    if not isinstance(value, int | float) or isinstance(value, bool) or not np.isfinite(value):
        raise DataError(f"a finite number in {key!r} in {where}", f"{value!r:.80}", "Fix the row.")
    return float(value)
