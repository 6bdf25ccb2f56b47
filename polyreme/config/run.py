"""The configuration of a run: its sections and the constraints between them.

Invariant: some part of the system reads every key, and an unknown key is an error.
"""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from polyreme.config.base import BaseConfig
from polyreme.config.data import DataConfig, Sources, TaskSource
from polyreme.config.environment import EnvironmentConfig
from polyreme.config.evaluation import PART, EvaluationSet, best_metric, check_pattern
from polyreme.config.model import ModelConfig, WeightsConfig
from polyreme.config.recipes.algorithm import AlgorithmConfig
from polyreme.config.recipes.recipe import Recipe, Zero
from polyreme.config.recipes.recipe_checks import check
from polyreme.config.reward import RewardConfig
from polyreme.config.rollout import RolloutConfig
from polyreme.config.section import Operational
from polyreme.config.security import SecurityConfig
from polyreme.config.teacher import TeacherConfig
from polyreme.config.trainer import CriticConfig, TrainerConfig


class RunConfig(BaseConfig):
    iterations: Operational[int] = Field(
        ge=0, description="Number of iterations to train. 0: only evaluate the model, after the warm start if there is one."
    )
    groups_per_iteration: int = Field(ge=1, description="Prompts per iteration.")
    group_size: int = Field(ge=1, description="Samples per prompt.")
    placement: Operational[Literal["separate", "colocated"]] = Field(
        "separate",
        description="separate: learner and replicas use different devices. colocated: they share the same devices and use them"
        " in turn.",
    )
    max_staleness: int = Field(0, ge=0, description="Maximum staleness of a sample, in iterations. 0: on-policy.")
    max_attempts: int = Field(3, ge=1, description="Attempts at a group before it counts as failed.")
    max_failed_fraction: float = Field(
        0.2, ge=0, le=1, description="The run fails when a larger fraction of the last 50 groups has failed."
    )
    eval_interval: Operational[int] = Field(
        0, ge=0, description="Iterations between evaluations. 0: only before the first iteration and after the last."
    )
    eval_samples: Operational[int] = Field(500, ge=1, description="Maximum number of held-out prompts per evaluation.")
    eval_answers: Operational[int] = Field(
        1,
        ge=1,
        le=1024,
        description="Answers to each held-out prompt. 1: one greedy answer. More: sampled ones, for pass@k and majority.",
    )
    eval_temperature: Operational[float] = Field(
        1.0, ge=0.01, le=2, description="Sampling temperature of the answers when eval_answers > 1."
    )
    eval_pattern: Operational[str | None] = Field(
        None,
        description="Regular expression that finds the answer in a response, for majority@k: its last match, or the first group"
        " of that match. null: the whole response.",
    )
    eval_sets: Operational[list[EvaluationSet]] = Field([], description="Sets of held-out prompts in addition to data.eval.")
    eval_best: Operational[str | None] = Field(
        None,
        description="SET/METRIC (METRIC for data.eval) that decides about hf/best, early stop and notices: mean, pass@k, mean@n,"
        " best@n, majority@n or reward/NAME. null: the mean of the first set.",
    )
    eval_stop_after: Operational[int] = Field(
        0, ge=0, description="Evaluations in a row without a new best result after which the run saves and stops. 0: never."
    )
    eval_hold: Operational[float] = Field(
        300.0, gt=0, description="Maximum seconds for which an evaluation keeps replicas at its version when max_staleness > 0."
    )
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    reward: RewardConfig | None = Field(
        None,
        description="Rewards of a response, and the reward service. null: the environment gives the rewards, or there is only a"
        " teacher.",
    )
    environment: EnvironmentConfig | None = Field(
        None,
        description="Environment for episodes of several turns. It gives the rewards, unless there is a section `reward`. null:"
        " a response is one turn.",
    )
    teacher: TeacherConfig | None = Field(None, description="The teacher of an on-policy distillation.")
    trainer: TrainerConfig
    weights: WeightsConfig = WeightsConfig()
    algorithm: AlgorithmConfig = Field(default_factory=lambda: AlgorithmConfig.model_validate({}))
    security: Operational[SecurityConfig | None] = Field(
        None,
        description="TLS and tokens of all services. `reward.security` and `environment.security` replace it for their service.",
    )

    @model_validator(mode="before")
    @classmethod
    def _secure_services_too(cls, tree: object) -> object:
        if not isinstance(tree, dict):
            return tree
        tree = {
            **tree,
            **{name: _secured(tree.get(name), tree.get("security")) for name in ("reward", "environment") if name in tree},
        }
        played, sets = tree.get("environment"), tree.get("eval_sets")
        security = (played.get("security") if isinstance(played, dict) else None) or tree.get("security")
        if isinstance(sets, list):  # all environments have the same server
            own = [each.get("environment") if isinstance(each, dict) else None for each in sets]
            secured = [_secured(each, security) for each in own]
            tree["eval_sets"] = [{**each, "environment": new} if new else each for each, new in zip(sets, secured, strict=True)]
        return tree

    _is_a_pattern = field_validator("eval_pattern")(check_pattern)

    @model_validator(mode="after")
    def _fits(self) -> "RunConfig":
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        if longest > self.rollout.max_model_len:
            raise ValueError(
                f"data.max_prompt_tokens + rollout.max_new_tokens = {longest} must fit rollout.max_model_len ="
                f" {self.rollout.max_model_len}"
            )
        steps, critic = self.algorithm.minibatches * self.algorithm.epochs, self.trainer.critic
        check(self.recipe, self.group_size, steps, critic=critic != CriticConfig())
        self._check_what_is_learned_from()
        if self.algorithm.minibatches > self.groups_per_iteration:
            raise ValueError(
                f"algorithm.minibatches = {self.algorithm.minibatches} exceeds groups_per_iteration ="
                f" {self.groups_per_iteration}: a mini-batch consists of whole groups"
            )
        self._check_asynchrony()
        for key, optimizer in (("trainer.optimizer", self.trainer.optimizer), ("trainer.critic.optimizer", critic.optimizer)):
            if optimizer is not None and optimizer.min_lr > optimizer.lr:
                raise ValueError(f"{key}.min_lr must not exceed {key}.lr")
        self._check_step_tokens()
        if self.trainer.orchestrators > self.rollout.max_num_seqs:
            raise ValueError(
                f"trainer.orchestrators = {self.trainer.orchestrators} exceeds rollout.max_num_seqs ="
                f" {self.rollout.max_num_seqs}, which they share; use fewer"
            )
        if self.device == "cpu" and self.rollout.vllm.speculative is not None:
            raise ValueError(
                "rollout.vllm.speculative needs device: cuda or npu; on CPU, vLLM then reports wrong log-probabilities, and"
                " samples other tokens for the same seed; use null"
            )
        if self.device != "cpu" and self.rollout.cpu_sleep == "end":
            raise ValueError(
                "rollout.cpu_sleep = end needs device: cpu; on accelerators, a sleeping engine frees their memory, see"
                " rollout.vllm.sleep_level; use pause"
            )
        return self

    def _check_step_tokens(self) -> None:
        """Raises ValueError unless a step can hold what it must."""
        tokens = self.rollout.vllm.max_num_batched_tokens
        if tokens is None:
            return
        if not self.chunks_prompts and tokens < self.rollout.max_model_len:
            raise ValueError(
                f"rollout.vllm.max_num_batched_tokens = {tokens} must be at least rollout.max_model_len ="
                f" {self.rollout.max_model_len}, since rollout.vllm.chunked_prefill is off"
            )
        if tokens <= self.rollout.max_num_seqs:
            raise ValueError(
                f"rollout.vllm.max_num_batched_tokens = {tokens} must be more than rollout.max_num_seqs ="
                f" {self.rollout.max_num_seqs}: a step has a token of each sample, and of the canary"
            )

    def _check_asynchrony(self) -> None:
        """Raises ValueError unless staleness, placement and token budget fit together."""
        budget, parts = self.rollout.tokens_per_iteration, self.max_staleness + 1
        longest, key = self.rollout.max_new_tokens, "rollout.max_new_tokens"
        if self.environment is not None and (played := self.environment.max_turns * longest) > longest:
            longest, key = (
                min(played, self.rollout.max_model_len),
                "the longest episode (max_turns x max_new_tokens, or max_model_len)",
            )
        if self.placement == "colocated" and self.max_staleness and budget is None:
            raise ValueError(
                f"max_staleness = {self.max_staleness} needs placement: separate, or rollout.tokens_per_iteration; on shared"
                " devices generation never overlaps training, so older samples without partial rollouts gain nothing: use 0"
            )
        if self.placement == "colocated" and self.holds_versions:
            raise ValueError(
                f"max_staleness = {self.max_staleness} with placement: colocated leaves no time for evaluations, since the"
                " learner may take the devices during one; remove data.eval and eval_sets and evaluate the checkpoints with"
                " `polyreme eval`, or use max_staleness: 0"
            )
        if budget is not None and budget >= longest:
            raise ValueError(
                f"rollout.tokens_per_iteration = {budget} must be below {key} = {longest}, or null: nothing would ever pause"
            )
        if budget is not None and budget * parts < longest:
            raise ValueError(
                f"rollout.tokens_per_iteration = {budget} gives a response {budget} x (max_staleness + 1) = {budget * parts}"
                f" tokens before it is too old; {key} = {longest} needs max_staleness = {-(-longest // budget) - 1} or a budget"
                f" of {-(-longest // parts)}"
            )

    def _check_what_is_learned_from(self) -> None:
        """Raises ValueError unless the rewards and the teacher match the algorithm."""
        if (self.algorithm.teacher_coef > 0) != (self.teacher is not None):
            missing = "the section `teacher`" if self.teacher is None else "algorithm.teacher_coef, which is 0"
            raise ValueError(f"a teacher and its weight go together; set {missing}, or use algorithm.preset: distillation")
        if self.teacher is not None and self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature = {self.rollout.temperature:g} must be 1 with a teacher, whose log-probabilities are those"
                " at 1"
            )
        learns = not (isinstance(self.algorithm.advantage, Zero) and self.teacher is not None)
        if self.reward is None and self.environment is None and learns:
            raise ValueError(
                f"the section `reward` is missing, from which algorithm.advantage: {self.algorithm.advantage.kind} learns"
            )
        self._check_environment()
        self._check_evaluation()

    def _check_environment(self) -> None:
        """Raises ValueError for what a run with an environment cannot have."""
        played = self.environments
        for name in {"": None, **played}:
            named = [tool for source in self.task_sources(name) for tool in source.tools or ()]
            if named and not (name in played and played[name].tools):
                raise ValueError(
                    f"sources of the data name tools, and environment.tools lists none; set environment: {{tools:"
                    f" [{', '.join(dict.fromkeys(named))}]}}"
                )
        if played and self.data.template != "chat":
            raise ValueError("`environment` needs data.template: chat, since an episode is a conversation")
        if self.environment is None:
            return
        self._check_online(self.environment)
        if self.environment.tools and self.reward is None and self.teacher is None:
            raise ValueError("environment.tools needs the section `reward`, which scores the episodes")
        if self.rollout.tokens_per_iteration is not None and self.environment.is_agent:
            raise ValueError(
                "rollout.tokens_per_iteration does not go with an agent, whose requests would time out during a pause; use null"
            )
        if self.rollout.tokens_per_iteration is not None and self.placement == "colocated":
            raise ValueError(
                "rollout.tokens_per_iteration with `environment` needs placement: separate, since the seconds of an episode"
                " count while the learner has the devices; use null and max_staleness: 0"
            )
        if self.trainer.moe.replay_routes:
            raise ValueError(
                "trainer.moe.replay_routes does not go with `environment`, whose own tokens have no reported routes; use false"
            )
        if self.recipe.advantage.needs_parts and self.reward is None:
            raise ValueError(
                "an advantage per reward (gdpo) needs the section `reward`: an environment gives an episode only one reward"
            )

    def _check_online(self, environment: EnvironmentConfig) -> None:
        """Raises ValueError for what a run on a product's sessions cannot have."""
        has = {
            "the section `reward`, since the product gives the rewards": self.reward is not None,
            "a `teacher`": self.teacher is not None,
            "data.eval, or eval_sets without an `environment`, since only the product can play its tasks": any(
                each.environment is None for each in self.evaluation_sets
            ),
            "placement: colocated, since the product's requests would wait for the learner": self.placement == "colocated",
            "trainer.orchestrators above 1, since one orchestrator makes all its groups": self.trainer.orchestrators > 1,
            "dynamic sampling": self.recipe.dynamic_sampling,
            "algorithm.skip_prompts": self.recipe.skip_prompts is not None,
            "an advantage with a greedy baseline": self.recipe.advantage.needs_greedy,
        }
        if environment.online is not None and (found := [name for name, given in has.items() if given]):
            raise ValueError(f"environment.online does not go with {found[0]}; remove one of the two")

    def _check_evaluation(self) -> None:
        """Raises ValueError unless the held-out sets are consistent and exist when a setting needs them."""
        if not self.evaluation_sets and (self.iterations == 0 or self.eval_stop_after):
            key = "iterations = 0" if self.iterations == 0 else "eval_stop_after"
            raise ValueError(f"{key} needs held-out prompts, data.eval or eval_sets")
        own = [each for each in self.eval_sets if each.environment is not None]
        if self.reward is None and self.environment is None and len(own) < len(self.evaluation_sets):
            raise ValueError("data.eval and eval_sets need the section `reward` or `environment`, which scores the answers")
        if self.reward is None and (needed := [each.name for each in own if each.is_rewarded]):
            raise ValueError(f"eval_sets: {needed[0]} needs the section `reward`, which scores its episodes")
        if any(each.environment and each.environment.security != self.environment_security for each in own):
            raise ValueError(
                "the environments of a run have one server; set `security`, or environment.security of the run, and none of a set"
            )
        names = [each.name for each in self.eval_sets]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"eval_sets has {', '.join(sorted(twice))} twice; each set needs a different name")
        if self.evaluation_sets or self.eval_best:
            best, metric = best_metric(self.evaluation_sets, self.eval_best, self.part_names)
            played = self.environments.get(best.played_in)
            if metric.startswith("pass@") and played and not self.is_rewarded(best) and not played.correctness:
                raise ValueError(f"eval_best = {self.eval_best} needs environment.correctness: true, rewards of 1 or 0")

    @property
    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """The held-out sets: that of data.eval, which has no name, then `eval_sets`."""
        if self.data.eval is None:
            return tuple(self.eval_sets)
        first = EvaluationSet.model_construct(
            name="",
            data=self.data.eval,
            samples=self.eval_samples,
            answers=self.eval_answers,
            temperature=self.eval_temperature,
            pattern=self.eval_pattern,
        )
        return (first, *self.eval_sets)

    @property
    def prompt_data(self) -> tuple[Sources, ...]:
        """The training data, then that of each held-out set."""
        return (self.data.train, *(each.data for each in self.evaluation_sets))

    def played_data(self, environment: str) -> tuple[Sources, ...]:
        """The data that is played in an environment, by its name in `environments`: that of training first."""
        sets = [each.data for each in self.evaluation_sets if each.played_in == environment]
        return (*sets,) if environment else (self.data.train, *sets)

    def task_sources(self, environment: str) -> tuple[TaskSource, ...]:
        """The sources of that data, without plain paths."""
        found = [each for data in self.played_data(environment) if isinstance(data, tuple) for each in data]
        return tuple(each for each in found if isinstance(each, TaskSource))

    @property
    def environments(self) -> dict[str, EnvironmentConfig]:
        """The environments by name: "" is that of the run, and a set's own has the set's name."""
        run = {} if self.environment is None else {"": self.environment}
        return run | {each.name: each.environment for each in self.eval_sets if each.environment is not None}

    @property
    def environment_security(self) -> SecurityConfig | None:
        """TLS and tokens of the environment service."""
        return self.security if self.environment is None else self.environment.security

    def is_rewarded(self, held_out: EvaluationSet) -> bool:
        """Whether the section `reward` scores a held-out set."""
        return self.reward is not None and (held_out.environment is None or held_out.is_rewarded)

    @property
    def reward_names(self) -> tuple[str, ...]:
        """The names of the rewards in the parts of a score; empty without rewards."""
        return tuple(spec.label for spec in self.reward.rewards) if self.reward else ()

    @property
    def part_names(self) -> tuple[str, ...]:
        """The names of the parts of a score: those of the rewards, then `environment`."""
        return (*self.reward_names, *((PART,) if self.environment else ()))

    @property
    def longest_sequence(self) -> int:
        """The most tokens that are trained on together: a prompt and a response, or with an environment a conversation."""
        return self.rollout.max_model_len if self.environment else self.data.max_prompt_tokens + self.rollout.max_new_tokens

    def evaluates(self, version: int) -> bool:
        """Whether the schedule includes an evaluation of `version`. The run's first version is always evaluated."""
        scheduled = version == self.iterations or (self.eval_interval > 0 and version % self.eval_interval == 0)
        return bool(self.evaluation_sets) and scheduled

    @property
    def chunks_prompts(self) -> bool:
        """Whether vLLM computes a long prompt in several steps."""
        chosen = self.rollout.vllm.chunked_prefill
        return self.device != "cpu" if chosen is None else chosen

    @property
    def ends_engines(self) -> bool:
        """Whether a replica's engine ends while a colocated learner trains."""
        return self.placement == "colocated" and self.rollout.cpu_sleep == "end"

    @property
    def holds_versions(self) -> bool:
        """Whether training can continue during an evaluation. An on-policy run has no samples to do so."""
        return bool(self.evaluation_sets) and self.max_staleness > 0

    def holds(self, version: int) -> bool:
        """Whether replicas stay at `version` until its evaluation ends."""
        return self.holds_versions and self.evaluates(version)

    @property
    def recipe(self) -> Recipe:
        """The algorithm as the learner runs it."""
        return self.algorithm.recipe(differs=self.max_staleness > 0 or self.model.dtype == "bfloat16")

    @property
    def shares_reference(self) -> bool:
        """Whether the reference is the actor without its adapters, in the same memory. After a warm start, and with
        `renew_interval`, the reference has the adapters merged into its weights, so it is a separate frozen model. A resume is
        refused when the checkpoint has adapters and only one of the checkpoint and the configuration has a warm start."""
        kl = self.recipe.kl
        return self.trainer.lora is not None and not self.trainer.sft and not (kl and kl.renew_interval)

    @property
    def samples_per_iteration(self) -> int:
        return self.groups_per_iteration * self.group_size

    def decisive_length(self) -> dict[str, object]:
        return {} if self.trainer.optimizer.schedule == "constant" else {"iterations": self.iterations}


def _secured(section: object, security: object) -> object:
    """A section as it is written, with this security if it has none of its own."""
    if not isinstance(section, dict) or section.get("security") is not None or security is None:
        return section
    return {**section, "security": security}
