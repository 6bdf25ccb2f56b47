"""The environment of a run, as its configuration names it.

Invariant: this is the only place that knows environments by name.
"""

from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run
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


def make_environment(
    run: Run,
    sampler: Sampler,
    scoring: Scoring,
    partial_log: PartialRolloutLog,
    budget: TokenBudget | None,
    experience: ExperienceLog,
) -> Environment:
    """The run's environment. Raises ConfigError when the chat template cannot continue a conversation."""
    config, settings = sampler.config, sampler.config.environment
    if settings is None:
        return SingleTurn(sampler, scoring, partial_log, budget)
    tail, bounds = Tail(sampler.template), Bounds(settings.max_turns, config.rollout.max_model_len, settings.max_seconds)
    if settings.online is not None:
        return OnlineExperience(run, sampler, tail, bounds, settings.online, experience)
    servers = EnvironmentClient(run, settings, config.data, config.seed)
    return Episodes(sampler, tail, servers, partial_log, bounds, settings.tries, scoring, budget)
