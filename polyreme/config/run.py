"""The configuration of a run: its sections, and what holds between them.

Invariant: some part of the system reads every key, and an unknown key is an error.
"""

from typing import Any

from pydantic import Field, model_validator

from polyreme.config.algorithm import AlgorithmConfig
from polyreme.config.base import BaseConfig
from polyreme.config.data import DataConfig
from polyreme.config.model import ModelConfig
from polyreme.config.recipe import Recipe
from polyreme.config.recipe_checks import check
from polyreme.config.reward import RewardConfig
from polyreme.config.rollout import RolloutConfig
from polyreme.config.section import Operational
from polyreme.config.security import SecurityConfig
from polyreme.config.trainer import TrainerConfig


class RunConfig(BaseConfig):
    iterations: Operational[int] = Field(ge=1, description="Iterations to train.")
    groups_per_iteration: int = Field(ge=1, description="Prompts per iteration.")
    group_size: int = Field(ge=1, description="Samples per prompt.")
    max_staleness: int = Field(0, ge=0, description="Iterations that a sample may lag behind. 0 is on-policy.")
    max_attempts: int = Field(3, ge=1, description="Attempts at a group before it counts as failed.")
    max_failed_fraction: float = Field(
        0.2, ge=0, le=1, description="Fraction of failed groups in a window of 50 beyond which a run stops admitting and fails."
    )
    eval_interval: Operational[int] = Field(
        0, ge=0, description="Iterations between evaluations. 0: only before the first and after the last."
    )
    eval_samples: Operational[int] = Field(500, ge=1, description="Held-out prompts per evaluation.")
    eval_hold: Operational[float] = Field(
        300.0,
        gt=0,
        description="Seconds that an evaluation may keep replicas from newer versions, where max_staleness > 0.",
    )
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig
    trainer: TrainerConfig
    algorithm: AlgorithmConfig = Field(default_factory=lambda: AlgorithmConfig.model_validate({}))
    security: Operational[SecurityConfig | None] = Field(
        None, description="TLS and tokens of every service's ports, and of the reward service's unless it has its own."
    )

    @model_validator(mode="before")
    @classmethod
    def _secure_rewards_too(cls, tree: Any) -> Any:
        reward = tree.get("reward") if isinstance(tree, dict) else None
        if isinstance(reward, dict) and tree.get("security") is not None and reward.get("security") is None:
            return {**tree, "reward": {**reward, "security": tree["security"]}}
        return tree

    @model_validator(mode="after")
    def _fits(self) -> "RunConfig":
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        if longest > self.rollout.max_model_len:
            raise ValueError(
                f"data.max_prompt_tokens + rollout.max_new_tokens = {longest} must fit rollout.max_model_len = {self.rollout.max_model_len}"
            )
        check(self.recipe, self.group_size, self.algorithm.minibatches * self.algorithm.epochs, self.algorithm.has_critic)
        if self.algorithm.teacher_coef > 0:
            raise ValueError("algorithm.teacher_coef must be 0: no part of a run asks a teacher yet")
        if self.algorithm.minibatches > self.groups_per_iteration:
            raise ValueError(
                f"algorithm.minibatches = {self.algorithm.minibatches} is more than groups_per_iteration = {self.groups_per_iteration}: a minibatch has whole groups"
            )
        if self.trainer.optimizer.min_lr > self.trainer.optimizer.lr:
            raise ValueError("trainer.optimizer.min_lr is above trainer.optimizer.lr")
        return self

    def evaluates(self, version: int) -> bool:
        """Whether the schedule asks for an evaluation of `version`. The run's first version is evaluated in any case."""
        scheduled = version == self.iterations or (self.eval_interval > 0 and version % self.eval_interval == 0)
        return self.data.eval is not None and scheduled

    @property
    def holds_versions(self) -> bool:
        """Whether training could move on from a version under evaluation. On-policy, it has no samples to do so."""
        return self.data.eval is not None and self.max_staleness > 0

    def holds(self, version: int) -> bool:
        """Whether replicas stay at `version` until it is evaluated."""
        return self.holds_versions and self.evaluates(version)

    @property
    def recipe(self) -> Recipe:
        """The algorithm as the learner runs it."""
        return self.algorithm.recipe(differs=self.max_staleness > 0 or self.model.dtype == "bfloat16")

    @property
    def samples_per_iteration(self) -> int:
        return self.groups_per_iteration * self.group_size

    def decisive_length(self) -> dict[str, Any]:
        return {} if self.trainer.optimizer.schedule == "constant" else {"iterations": self.iterations}
