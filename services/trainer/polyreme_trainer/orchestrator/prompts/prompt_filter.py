"""Groups that are left out: before sampling, those with always or never solved prompts; after scoring, those without a gradient.

Invariant: only a group's index and the pass rates in the log decide whether it is skipped, so a successor decides the same. In
one iteration at most REFILL times its number of groups is dropped, so it ends even if all prompts' scores are equal.
"""

from collections.abc import Callable

import numpy as np
import xxhash

from polyreme.config.recipes.recipe import SkipPrompts
from polyreme.experience.ledger import Admission, ExperienceLog
from polyreme.experience.pass_rates import Tally
from polyreme.experience.records import GroupRecord
from polyreme.experience.shard import ONLY, Shard
from polyreme_trainer.algorithms.filters import informative, reason_to_skip
from polyreme_trainer.data.prompt_store import Prompt
from polyreme_trainer.orchestrator.prompts.prompt_order import retry_draw

REFILL = 3
"""Number of groups that may be dropped for each group of an iteration."""


class DynamicSampling:
    """Dynamic sampling (Yu et al. 2025, arXiv 2503.14476, section 3.2): decides which groups are dropped, so that the log admits
    others in their place, and counts them and their scores. Groups beyond the limit are kept and make the batch smaller: the
    algorithm leaves them out of the loss and of its divisor.

    Args:
        enabled: whether groups are dropped at all.
        groups: the number of groups of an iteration.
        shard: the orchestrator, which may drop its share of the groups.
    """

    def __init__(self, enabled: bool, groups: int, shard: Shard = ONLY) -> None:
        self._limit = shard.share(REFILL * groups) if enabled else 0
        self._enabled = enabled
        self._left = self._limit  # groups that may still be dropped in this iteration
        self._dropped: list[float] = []
        self._kept: list[float] = []

    def drops(self, record: GroupRecord) -> bool:
        """Whether to drop a scored group, so that another may take its place. Counts the group."""
        scores = np.array([sample.score for sample in record.scored])
        useless = self._left > 0 and not informative(scores, np.zeros(len(scores), dtype=np.int64)).any()
        self._left -= useless
        (self._dropped if useless else self._kept).append(record.mean_reward)
        return useless

    def next_iteration(self) -> None:
        """The groups of an iteration are planned. As many may be dropped again."""
        self._left = self._limit

    def take(self) -> dict[str, tuple[float, int]]:
        """The counts of an iteration's metrics since the last call: dropped groups, and the mean score of all groups, dropped
        ones included. Resets them."""
        scored = [*self._dropped, *self._kept]
        counts = {"rollout/dropped_groups": (float(len(self._dropped)), 0)}
        if scored:
            counts["rollout/mean_score"] = (float(np.sum(scored)), len(scored))
        self._dropped, self._kept = [], []
        return counts if self._enabled else {}


class PromptFilter:
    """Decides which groups are skipped, and counts how often the prompts of the others are solved.

    Args:
        rule: the rule of the recipe. None: nothing is skipped or counted.
        seed: the run's seed.
        prompt_of: the prompt of a group index.
    """

    def __init__(
        self, rule: SkipPrompts | None, seed: int, experience: ExperienceLog, prompt_of: Callable[[int], Prompt]
    ) -> None:
        self._rule, self._seed, self._experience, self._prompt_of = rule, seed, experience, prompt_of
        self._skipped = self._samples = self._solved = 0

    async def skips(self, admission: Admission) -> bool:
        """Whether the group is left out; the log then has it as dropped. Raises StaleAttemptError."""
        if self._rule is None:
            return False
        rate = await self._experience.pass_rate(prompt_key(self._prompt_of(admission.index)))
        reason = reason_to_skip(self._rule, rate, retry_draw(self._seed, admission.index))
        if reason is not None:
            await self._experience.skip(admission.index, admission.attempt, reason)
            self._skipped += 1
        return reason is not None

    def count_solved(self, record: GroupRecord) -> Tally | None:
        """The number of solved samples of the group; None without a rule."""
        if self._rule is None:
            return None
        count, solved = len(record.scored), sum(sample.score > self._rule.solved_above for sample in record.scored)
        self._samples, self._solved = self._samples + count, self._solved + solved
        return Tally(prompt_key(self._prompt_of(record.index)), count, solved)

    def take(self) -> dict[str, tuple[float, int]]:
        """Metric counts of an iteration since the last call: skipped prompts, and mean pass rate of sampled ones. Resets them."""
        if self._rule is None:
            return {}
        counts = {"rollout/skipped_prompts": (float(self._skipped), 0)}
        if self._samples:
            counts["rollout/pass_rate"] = (self._solved, self._samples)
        self._skipped = self._samples = self._solved = 0
        return counts


def prompt_key(prompt: Prompt) -> str:
    """The name of a prompt in the log: xxh3_64 (hexadecimal) of its tokens, label and metadata."""
    digest = xxhash.xxh3_64()
    for part in (prompt.ids.tobytes(), prompt.label.encode(), prompt.metadata_json.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
