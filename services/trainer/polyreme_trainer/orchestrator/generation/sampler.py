"""Samples from the policy over all replicas, with the run's settings.

Invariant: a token's seed depends only on the run's seed, the group's index and attempt, the sample and the token's position.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

import numpy as np

from polyreme.config.run import RunConfig
from polyreme.experience.ledger import Admission
from polyreme_trainer.data.template import Template
from polyreme_trainer.orchestrator.generation.generate import PLAIN, GenerateOptions, Generation, generate
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout
from polyreme_trainer.orchestrator.prompts.prompt_order import sequence_seed
from polyreme_trainer.orchestrator.replicas.replica_pool import ReplicaPool


@dataclass(frozen=True)
class Sampler(ABC):
    """The policy of a run, of which it has the settings."""

    run_id: str
    config: RunConfig
    template: Template

    def of_group(self, admission: Admission, prompt_ids: np.ndarray) -> Generation:
        """The request for the samples of a group. `prompt_ids`: int32 [p]."""
        config = self.config
        return Generation(
            run_id=self.run_id,
            name=f"group-{admission.index}-{admission.attempt}",
            prompt_ids=prompt_ids,
            count=config.group_size,
            max_new=config.rollout.max_new_tokens,
            temperature=config.rollout.temperature,
            stop_ids=self.template.stop_ids,
            seed=partial(sequence_seed, config.seed, admission.index, admission.attempt),
            min_version=admission.version,
        )

    @abstractmethod
    async def sample(self, wanted: Generation, options: GenerateOptions = PLAIN) -> list[PartialRollout]:
        """See `generate`."""


@dataclass(frozen=True)
class ReplicaSampler(Sampler):
    """The policy as the replicas of a run serve it."""

    pool: ReplicaPool

    async def sample(self, wanted: Generation, options: GenerateOptions = PLAIN) -> list[PartialRollout]:
        rollout = self.config.rollout
        timeouts = {"chunk_timeout": rollout.chunk_timeout, "progress_timeout": rollout.start_timeout}
        return await generate(self.pool, wanted, options, **timeouts)
