"""One attempt at a group: the environment plays its episodes, which become the record for the experience log.

Invariant: the prompt depends only on the index.
"""

import time

from polyreme.config.run import RunConfig
from polyreme.experience.ledger import Admission
from polyreme.experience.records import GroupRecord
from polyreme_trainer.data.prompt_store import Prompt
from polyreme_trainer.data.prompts import Dataset
from polyreme_trainer.orchestrator.environment.protocol import Environment, Task
from polyreme_trainer.orchestrator.prompts.prompt_order import PromptOrder


class GroupMaker:
    """Makes groups from admissions."""

    def __init__(self, config: RunConfig, dataset: Dataset, environment: Environment) -> None:
        self._prompts, self._environment = dataset.prompts, environment
        data = config.data
        seed = config.seed if data.shuffle_seed is None else data.shuffle_seed
        weights = [weight for weight in data.weights if weight is not None]
        self._order = PromptOrder(seed, dataset.sizes, weights or None, shuffled=data.shuffle)

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a group."""
        return self._prompts[self._order.row_of(index)]

    async def make(self, admission: Admission) -> GroupRecord:
        """Runs one attempt. Raises as `Environment.play`."""
        began, prompt = time.time(), self.prompt_of(admission.index)
        played = await self._environment.play(Task(admission, prompt))
        return GroupRecord(
            index=admission.index,
            attempt=admission.attempt,
            prompt_ids=prompt.ids,
            samples=played.samples,
            prompt=prompt.text,
            label=prompt.label,
            generate_seconds=played.generate_seconds,
            score_seconds=played.score_seconds,
            began=began,
            episodes=played.episodes,
        )
