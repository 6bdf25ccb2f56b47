"""Sets of held-out prompts, and the result that decides about the best version.

Invariant: a metric's name is SET/METRIC, or METRIC for the set of `data.eval`, which has no name.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, field_validator

from polyreme.config.data import DataSource
from polyreme.config.section import Section

RESERVED = frozenset(
    {"actor", "checkpoint", "critic", "device", "eval", "importance", "moe", "offload", "partial", "prompt_length"}
    | {"reference", "response_length", "reward", "reward_weighted", "rollout", "sft", "staleness", "stop", "time"}
    | {"timing", "tokens", "train", "weights"}
)
"""Prefixes of the metrics of training."""
_SEVERAL = ("mean", "best", "majority")  # METRIC@n, over all n answers


class EvaluationSet(Section):
    """An additional set of held-out prompts, with separate metrics."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="First part of the set's metrics: NAME/accuracy.")
    data: Path | tuple[Path | DataSource, ...] = Field(description="As data.eval.")
    samples: int = Field(500, ge=1, description="Prompts per evaluation.")
    answers: int = Field(1, ge=1, le=1024, description="As eval_answers.")
    temperature: float = Field(1.0, ge=0.01, le=2, description="As eval_temperature.")
    pattern: str | None = Field(None, description="As eval_pattern.")

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if name in RESERVED:
            raise ValueError(f"{name}/... are metrics of the training; choose another name")
        return name

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str | None) -> str | None:
        return check_pattern(pattern)

    def metric(self, name: str) -> str:
        """The name of one of the set's metrics in records."""
        return f"{self.name}/{name}" if self.name else name

    def has_metric(self, name: str) -> bool:
        """Whether the set can have a metric: `mean`, `reward/NAME`, or one over several answers. `pass@k` also needs scores of right and
        wrong answers, which this check cannot know."""
        kind, _, count = name.partition("@")
        if not count:
            return name == "mean" or name.startswith("reward/")
        if not (count.isdecimal() and count.isascii()) or self.answers < 2:
            return False
        return int(count) in pass_sizes(self.answers) if kind == "pass" else kind in _SEVERAL and int(count) == self.answers


def pass_sizes(answers: int) -> list[int]:
    """The values k of pass@k for this number of answers: 1, 2, 4, ... and the number itself."""
    return sorted({*(2**power for power in range(answers.bit_length()) if 2**power <= answers), answers})


def check_pattern(pattern: str | None) -> str | None:
    """Returns the pattern. Raises ValueError when it is not a regular expression."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"the pattern is not a regular expression: {error}") from None
    return pattern


def best_metric(sets: Sequence[EvaluationSet], chosen: str | None) -> tuple[EvaluationSet, str]:
    """The set and metric that `eval_best` chooses; None: the mean of the first set. Raises ValueError when there is no such metric."""
    if chosen is None:
        return sets[0], "mean"
    for each in sets:
        prefix = each.metric("")
        if chosen.startswith(prefix) and each.has_metric(metric := chosen.removeprefix(prefix)):
            return each, metric
    names = ", ".join(each.metric("mean") for each in sets) or "none, as there is no held-out set"
    raise ValueError(
        f"eval_best = {chosen} is not a metric of a held-out set; the metrics are {names}, and with several answers SET/pass@k"
    )
