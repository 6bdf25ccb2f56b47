"""Pass rates of prompts: leaves out prompts that are always or never solved, and counts how often the others are.

Invariant: only a group's index and the pass rates in the log decide whether it is skipped, so a successor makes the same decisions.
"""

from collections.abc import Callable

import xxhash

from polyreme.config.recipes.recipe import SkipPrompts
from polyreme.experience.ledger import Admission, ExperienceLog
from polyreme.experience.pass_rates import Tally
from polyreme.experience.records import GroupRecord
from polyreme_trainer.algorithms.filters import reason_to_skip
from polyreme_trainer.data.prompt_store import Prompt
from polyreme_trainer.orchestrator.prompts.prompt_order import retry_draw


class PromptFilter:
    """Decides which groups are skipped, and judges those that are not.

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

    def take(self) -> dict[str, float]:
        """Metrics since the last call: skipped prompts, and the mean pass rate of those that were sampled. Resets the counts."""
        if self._rule is None:
            return {}
        metrics = {"rollout/skipped_prompts": float(self._skipped)}
        if self._samples:
            metrics["rollout/pass_rate"] = self._solved / self._samples
        self._skipped = self._samples = self._solved = 0
        return metrics


def prompt_key(prompt: Prompt) -> str:
    """The name of a prompt in the log: xxh3_64 (hexadecimal) of its tokens, label and metadata."""
    digest = xxhash.xxh3_64()
    for part in (prompt.ids.tobytes(), prompt.label.encode(), prompt.metadata_json.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
