"""Sets of held-out prompts, and the result that decides about the best version.

Invariant: a metric's name is SET/METRIC, or METRIC for the set of `data.eval`, which has no name.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from polyreme.config.data import TaskSource
from polyreme.config.environment import EnvironmentConfig
from polyreme.config.named_input import HELD_OUT
from polyreme.config.section import Section

RESERVED = frozenset(
    {
        "actor",
        "checkpoint",
        "critic",
        "device",
        "episode",
        "eval",
        "importance",
        "moe",
        "offload",
        "online",
        "partial",
        "prompt_length",
    }
    | {"reference", "resources", "response_length", "reward", "reward_weighted", "rollout", "sft", "staleness", "stop", "time"}
    | {"timing", "tokens", "train", "weights"}
)
"""Prefixes of the metrics of training."""
PART = "environment"
"""The name of an environment's reward among the parts of a score."""
_SEVERAL = ("mean", "best", "majority")  # METRIC@n, over all n answers


def check_pattern(pattern: str | None) -> str | None:
    """Returns the pattern. Raises ValueError when it is not a regular expression."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise ValueError(f"the pattern is not a regular expression: {error}") from None
    return pattern


class EvaluationSet(Section):
    """An additional set of held-out prompts, with separate metrics."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="First part of the set's metrics: NAME/accuracy.")
    data: Annotated[Path | tuple[Path | TaskSource, ...], HELD_OUT] = Field(description="As data.eval.")
    samples: int = Field(500, ge=1, description="Prompts per evaluation.")
    answers: int = Field(1, ge=1, le=1024, description="As eval_answers.")
    temperature: float = Field(1.0, ge=0.01, le=2, description="As eval_temperature.")
    pattern: str | None = Field(None, description="As eval_pattern.")
    environment: EnvironmentConfig | None = Field(
        None, description="Environment of the set's episodes, as the run's section `environment`. null: that of the run."
    )
    scored_by: Literal["environment", "reward"] | None = Field(
        None,
        description="What scores episodes of the set's own environment: that, or the section `reward`. null: the environment;"
        " for `tools`, the section.",
    )

    @field_validator("name")
    @classmethod
    def _is_free(cls, name: str) -> str:
        if name in RESERVED:
            raise ValueError(f"{name}/... are metrics of the training; choose another name")
        return name

    _is_a_pattern = field_validator("pattern")(check_pattern)

    @model_validator(mode="after")
    def _can_be_played(self) -> "EvaluationSet":
        if self.environment is None:
            if self.scored_by is not None:
                raise ValueError("`scored_by` belongs to a set with an `environment`; remove it")
            return self
        if self.environment.online is not None:
            raise ValueError(
                "`environment.online` cannot play held-out tasks, since only the product can; choose another environment"
            )
        if self.environment.tools and self.scored_by == "environment":
            raise ValueError("`environment.tools` give no rewards; use scored_by: reward")
        return self

    @property
    def is_rewarded(self) -> bool:
        """Whether the section `reward` scores the episodes of the set's own environment."""
        assert self.environment is not None
        return self.scored_by == "reward" or bool(self.environment.tools)

    def metric(self, name: str) -> str:
        """The name of one of the set's metrics in records."""
        return f"{self.name}/{name}" if self.name else name

    @property
    def played_in(self) -> str:
        """The name of its environment: its own, or "", that of the run."""
        return self.name if self.environment is not None else ""

    def metrics(self, parts: Sequence[str]) -> list[str]:
        """The metrics that the set can have, without its name. `pass@k` also needs scores of right and wrong answers.

        Args:
            parts: names of the parts of a score in the run. A set with its own environment has others.
        """
        if self.environment is not None:
            parts = [*(name for name in parts if name != PART and self.is_rewarded), PART]
        several = [f"{kind}@{self.answers}" for kind in _SEVERAL] + [f"pass@{k}" for k in pass_sizes(self.answers)]
        return ["mean", *(several if self.answers > 1 else ()), *(f"reward/{name}" for name in parts)]


def pass_sizes(answers: int) -> list[int]:
    """The values k of pass@k for this number of answers: 1, 2, 4, ... and the number itself."""
    return sorted({*(2**power for power in range(answers.bit_length()) if 2**power <= answers), answers})


def without_part(metric: str, rewards: Sequence[str]) -> str:
    """The metric of the reward that reports a sub-part, for reward/NAME/PART; any other metric unchanged."""
    return next((of for name in rewards if metric.startswith(f"{(of := f'reward/{name}')}/")), metric)


def best_metric(sets: Sequence[EvaluationSet], chosen: str | None, parts: Sequence[str]) -> tuple[EvaluationSet, str]:
    """The set and metric that `eval_best` chooses; None: the mean of the first set.

    Args:
        sets: the held-out sets.
        chosen: SET/METRIC, METRIC for the set without a name, or None.
        parts: names of the parts of a score in the run.

    Raises:
        ValueError: no set can have this metric.
    """
    if chosen is None:
        return sets[0], "mean"
    for each in sets:
        prefix = each.metric("")
        metric = chosen.removeprefix(prefix)
        if chosen.startswith(prefix) and without_part(metric, parts) in each.metrics(parts):
            return each, metric
    names = ", ".join(each.metric(name) for each in sets for name in each.metrics(parts))
    raise ValueError(
        f"eval_best = {chosen} is none of the metrics of the held-out sets ({names or 'there is no set'}); choose one of these"
    )
