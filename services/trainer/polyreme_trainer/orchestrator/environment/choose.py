"""The environments of a run, as its configuration names them.

Invariant: this is the only place that knows environments by name.
"""

from polyreme.config.environment import EnvironmentConfig
from polyreme.config.run import RunConfig
from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run
from polyreme.experience.shard import ONLY, Shard
from polyreme_trainer.data.tail import Tail
from polyreme_trainer.orchestrator.environment.environment_client import EnvironmentClient
from polyreme_trainer.orchestrator.environment.episodes import Episodes
from polyreme_trainer.orchestrator.environment.online import OnlineExperience
from polyreme_trainer.orchestrator.environment.protocol import Environment
from polyreme_trainer.orchestrator.environment.session import Bounds
from polyreme_trainer.orchestrator.environment.single_turn import SingleTurn
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.sampler import Sampler
from polyreme_trainer.orchestrator.generation.token_budget import TokenBudget
from polyreme_trainer.orchestrator.scoring.scoring import Scoring


def make_environments(
    run: Run,
    sampler: Sampler,
    scoring: Scoring,
    partial_log: PartialRolloutLog,
    budget: TokenBudget | None,
    experience: ExperienceLog,
) -> dict[str, Environment]:
    """The environments by name: the run's, and those that held-out sets have of their own; see `RunConfig.environments`.

    Raises ConfigError when the chat template cannot continue a conversation.
    """
    config, settings = sampler.config, sampler.config.environment
    made: dict[str, Environment] = {}
    if settings is None:
        made[""] = SingleTurn(sampler, scoring, partial_log, budget)
    elif settings.online is not None:
        tail, bounds = Tail(sampler.template), _bounds(config, settings)
        made[""] = OnlineExperience(run, sampler, tail, bounds, settings.online, experience)
    else:
        made[""] = _episodes(run, sampler, "", settings, partial_log, scoring, budget, experience.shard)
    for held_out in config.eval_sets:
        if held_out.environment is not None:
            scores = Scoring(scoring.rewards if held_out.is_rewarded else None, None)
            made[held_out.name] = _episodes(
                run, sampler, held_out.name, held_out.environment, partial_log, scores
            )  # of the leading one
    return made


def _episodes(
    run: Run,
    sampler: Sampler,
    name: str,
    settings: EnvironmentConfig,
    partial_log: PartialRolloutLog,
    scoring: Scoring,
    budget: TokenBudget | None = None,
    shard: Shard = ONLY,
) -> Episodes:
    config = sampler.config
    host, tail = EnvironmentClient(run, settings, config.data, config.seed, name, shard), Tail(sampler.template)
    return Episodes(sampler, tail, host, partial_log, _bounds(config, settings), settings.tries, scoring, budget)


def _bounds(config: RunConfig, settings: EnvironmentConfig) -> Bounds:
    return Bounds(settings.max_turns, config.rollout.max_model_len, settings.max_seconds)
