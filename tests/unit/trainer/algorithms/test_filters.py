"""Dynamic sampling, and skipped prompts."""

import numpy as np
import pytest

from polyreme.config.recipes.presets import resolve
from polyreme.config.recipes.recipe import SkipPrompts
from polyreme.config.recipes.recipe_checks import check
from polyreme.errors import ConfigError
from polyreme.experience.pass_rates import PassRate
from polyreme_trainer.algorithms.filters import informative, reason_to_skip

RULE = SkipPrompts(min_samples=8, retry=0.25)


def test_groups_of_equal_scores_are_not_informative() -> None:
    scores = np.array([1.0, 0.0, 1.0, 1.0, 0.1 + 0.2, 0.3, 0.0])
    group = np.array([4, 4, 2, 2, 9, 9, 1])
    assert informative(scores, group).tolist() == [True, True, False, False, False, False, False]


@pytest.mark.parametrize(
    ("rate", "reason"),
    [
        (PassRate(), None),
        (PassRate(7, 0, -7), None),  # too few to decide
        (PassRate(8, 0, -8), "never solved"),
        (PassRate(8, 8, 8), "always solved"),
        (PassRate(80, 8, 8), "always solved"),  # only the newest samples count
        (PassRate(80, 40, 0), None),
        (PassRate(80, 79, 7), None),
    ],
)
def test_what_was_lately_always_or_never_solved_is_skipped_but_for_some_retries(rate: PassRate, reason: str | None) -> None:
    assert reason_to_skip(RULE, rate, draw=0.25) == reason
    assert reason_to_skip(RULE, rate, draw=0.249) is None


def test_either_side_may_be_kept() -> None:
    never, always = PassRate(8, 0, -8), PassRate(8, 8, 8)
    only_never, only_always = (RULE.model_copy(update={side: False}) for side in ("always", "never"))
    assert (reason_to_skip(only_never, never, 0.9), reason_to_skip(only_never, always, 0.9)) == ("never solved", None)
    assert (reason_to_skip(only_always, never, 0.9), reason_to_skip(only_always, always, 0.9)) == (None, "always solved")


def test_a_rule_that_skips_nothing_is_refused() -> None:
    with pytest.raises(ConfigError):
        check(resolve("dapo", {"skip_prompts": {"always": False, "never": False}}), group_size=4, steps=1, critic=False)


def test_a_pass_rate_survives_the_log() -> None:
    rate = PassRate(12, 3, -4)
    assert PassRate.parse(str(rate)) == rate
