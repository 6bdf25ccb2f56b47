"""The run summary that is printed before training starts.

Invariant: a function of the configuration and of the notices of the checks; with routing replay, also of the model's config.json,
and with an own algorithm, of its source.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

from polyreme.config.base import BaseConfig
from polyreme.config.data import Sources
from polyreme.config.evaluation import EvaluationSet
from polyreme.config.python_source import parse
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig, StageTrainer
from polyreme.config.trainer import OptimizerConfig, TrainerConfig
from polyreme.dataset.source import as_sources
from polyreme.errors import ConfigError
from polyreme.rundir.input_files import route_bytes

_TOKEN_BYTES = 4 + 4 + 1 + 4
"""Bytes of a response token in the log: id, log-probability, mask, and up to four bytes of text."""
_NUMBER_BYTES = 4
"""Bytes of each further number of a response token: from the rewards, which may return one per token, and from a teacher."""
_GROUP_OVERHEAD_BYTES = 1024


def summary_lines(config: RunConfig, notices: Iterable[str] = ()) -> list[str]:
    """The run as lines of text: counts, learning rates, save and evaluation intervals, memory of Redis, then warnings.

    Args:
        config: the resolved configuration.
        notices: notices of the checks.
    """
    trainer = config.trainer
    spread = f" over {trainer.parallel.nodes} machines" if trainer.parallel.nodes > 1 else ""
    lines = [
        f"iterations     {config.iterations} of {config.groups_per_iteration} prompts x {config.group_size} samples"
        f" = {config.iterations * config.groups_per_iteration:,} groups,"
        f" {config.iterations * config.samples_per_iteration:,} samples",
        f"mini-batches   {minibatch_line(config)}",
        f"learning rate  {learning_rate(trainer.optimizer, config.iterations)}",
        f"""evaluates      {
            _when(config.eval_interval, config.iterations, config.evaluation_sets)
            if config.evaluation_sets
            else "never: data.eval is not set"
        }""",
        f"saves          {_saves(trainer, config.iterations)}",
        f"trainer        {trainer.parallel.layout}{spread} on {config.device}, {config.model.dtype}",
        f"rollout        {config.rollout.replicas} replica(s), tensor {config.rollout.tensor_parallel},"
        f" up to {config.rollout.max_new_tokens} new tokens",
        f"Redis holds    at most {redis_bytes(config) / 2**20:,.1f} MiB",
    ]
    lines.insert(2, f"algorithm      {algorithm_line(config)}")
    if config.max_staleness:
        lines.insert(3, f"asynchrony     samples up to {config.max_staleness} iterations behind")
    for number, phase in enumerate(trainer.sft, start=1):
        lines.insert(
            number - 1,
            f"warm start {number}   {phase.steps} steps x {phase.batch_size} sequences of {_names(config, phase.data)},"
            f" learning rate {phase.lr:g}",
        )
    return lines + _name_lines(config) + [f"warning        {text}" for text in (*_warnings(config), *notices)]


def lines_of(config: RunConfig | StageConfig, notices: Iterable[str] = ()) -> list[str]:
    """The summary of a run or a stage. Arguments as `summary_lines`."""
    return stage_lines(config, notices) if isinstance(config, StageConfig) else summary_lines(config, notices)


def stage_lines(config: StageConfig, notices: Iterable[str] = ()) -> list[str]:
    """The summary of a stage. Arguments as `summary_lines`."""
    trainer, parallel = config.trainer, config.trainer.parallel
    length = f"{trainer.steps} steps" if trainer.steps else f"{trainer.epochs:g} passes over {_names(config, config.data.train)}"
    evaluates = (
        f"{_names(config, config.data.eval)} before the first step, after the last"
        if config.data.eval
        else "never: data.eval is not set"
    )
    between = f" and every {trainer.eval_interval} steps" if config.data.eval and trainer.eval_interval else ""
    every = [f"every {trainer.save_interval} steps"] * bool(trainer.save_interval) + _timed_saves(trainer)
    saves = f"{', '.join(every)} and after the last step"
    lines = [
        f"stage          {config.title}: {length}, {trainer.batch_size} rows per step",
        f"learning rate  {learning_rate(trainer.optimizer, trainer.steps, 'steps')}",
        f"evaluates      {evaluates}{between}",
        f"saves          {saves}, keeping {trainer.keep_checkpoints}",
        f"trainer        {parallel.layout} on {config.device}, {config.model.dtype}",
    ]
    late = {
        "trainer.save_interval": trainer.save_interval,
        "trainer.eval_interval": trainer.eval_interval if config.data.eval else 0,
    }
    warnings = [
        f"{key} = {interval} is longer than the stage: only after step {trainer.steps}"
        for key, interval in late.items()
        if trainer.steps is not None and interval > trainer.steps
    ]
    return lines + _name_lines(config) + [f"warning        {text}" for text in (*warnings, *notices)]


def _name_lines(config: BaseConfig) -> list[str]:
    return [f"{each.type:<14} {each} in {each.path}" for each in config.names]


def _warnings(config: RunConfig) -> list[str]:
    """Settings that have no effect."""
    intervals = {"trainer.save_interval": config.trainer.save_interval}
    if config.evaluation_sets:
        intervals["eval_interval"] = config.eval_interval
    found = [
        f"{key} = {interval} is longer than the run, so it applies only after iteration {config.iterations}"
        for key, interval in intervals.items()
        if interval > config.iterations > 0
    ]
    kl, critic = config.recipe.kl, config.trainer.critic
    if kl is not None and kl.renew_interval >= config.iterations > 0:
        found.append(
            f"algorithm.kl.renew_interval = {kl.renew_interval} is not shorter than the run: the reference stays version 0"
        )
    if config.algorithm.has_critic and 0 < config.iterations <= critic.warmup_iterations:
        found.append(
            f"trainer.critic.warmup_iterations = {critic.warmup_iterations} is the whole run: the actor is never trained"
        )
    for key, optimizer in (("trainer.optimizer", config.trainer.optimizer), ("trainer.critic.optimizer", critic.optimizer)):
        if optimizer is not None and optimizer.warmup > config.iterations > 0:
            found.append(f"{key}.warmup = {optimizer.warmup} is longer than the run: the learning rate never reaches its peak")
    return found


def minibatch_line(config: RunConfig) -> str:
    """How an iteration's samples become optimizer steps, and how many there are."""
    algorithm, steps = config.algorithm, config.algorithm.minibatches * config.algorithm.epochs
    groups = -(-config.groups_per_iteration // algorithm.minibatches)
    most = "" if groups * algorithm.minibatches == config.groups_per_iteration else "up to "
    each = (
        f"{algorithm.minibatches} of {most}{groups} groups ({groups * config.group_size} samples) x {algorithm.epochs} epoch(s)"
    )
    return f"{each} = {steps} optimizer step(s) per iteration, {config.iterations * steps:,} in all"


def algorithm_line(config: RunConfig) -> str:
    """The recipe's primitives on one line, with the user's functions in place of those that they replace."""
    recipe, name, own = config.recipe, config.algorithm.preset, set[str]()
    if (source := config.algorithm.source) is not None:
        name = f"{source.module or source.file} on the preset {name}"
        with suppress(ConfigError):  # an error of the checks
            own = {"advantages", "loss"} & parse(source.code(), name).keys()
    kl = "no KL" if recipe.kl is None else f"KL {recipe.kl.estimator} x {recipe.kl.coef:g} in the {recipe.kl.place}"
    corrected = " and ".join(each.kind for each in recipe.correction) or "no correction"
    advantages, loss = (
        "own" if function in own else kind
        for function, kind in (("advantages", recipe.advantage.kind), ("loss", recipe.loss.kind))
    )
    return f"{name}: {advantages} advantages, {loss} loss, {recipe.aggregation}, {kl}, {corrected}"


def learning_rate(optimizer: OptimizerConfig, length: int | None, unit: str = "iterations") -> str:
    """The schedule in words. `length`: length of the run in `unit`; None: it follows from the data."""
    warmup = f"{optimizer.warmup} {unit} of warm-up, then " if optimizer.warmup else ""
    if optimizer.schedule == "constant":
        return f"{warmup}constant {optimizer.lr:g}"
    end = "the end" if length is None else f"{unit.removesuffix('s')} {length}"
    return f"{warmup}{optimizer.schedule} from {optimizer.lr:g} to {optimizer.min_lr:g} at {end}"


def redis_bytes(config: RunConfig) -> int:
    """Upper bound in bytes of the groups in the log: all iterations since the oldest checkpoint, and the groups in generation.

    Raises ConfigError for a model whose experts cannot be counted although their routes are replayed.
    """
    routes = route_bytes(config.model.path) if config.trainer.moe.replay_routes else 0
    token = _TOKEN_BYTES + routes + _NUMBER_BYTES * ((config.reward is not None) + (config.teacher is not None))
    response = config.rollout.max_new_tokens * token
    if config.environment is not None:  # an agent may begin a trajectory with each turn
        response = config.longest_sequence * token * (config.environment.max_turns if config.environment.is_agent else 1)
    group = _GROUP_OVERHEAD_BYTES + config.data.max_prompt_tokens * 8 + config.group_size * response
    save_interval = config.trainer.save_interval or config.iterations
    since_oldest = save_interval * (config.trainer.keep_checkpoints + 1)  # a checkpoint may be written until the next save
    held = min(config.iterations, since_oldest) + 1 + config.max_staleness
    return group * config.groups_per_iteration * held


def _when(interval: int, iterations: int, sets: Sequence[EvaluationSet]) -> str:
    parts = [f"{each.samples} {each.name}".rstrip() for each in sets]
    prompts = f"up to {' + '.join(parts)} held-out prompts"
    return f"{prompts} before iteration 1 and {_points(interval, iterations)}" if iterations else f"{prompts}, and trains nothing"


def _saves(trainer: TrainerConfig, iterations: int) -> str:
    points = [*_timed_saves(trainer), _points(trainer.save_interval, iterations)]
    return f"{' and '.join(points)}, keeping {trainer.keep_checkpoints}"


def _timed_saves(trainer: TrainerConfig | StageTrainer) -> list[str]:
    return [f"every {trainer.save_seconds / 60:g} minutes"] if trainer.save_seconds else []


def _points(interval: int, iterations: int) -> str:
    if not interval:
        return f"after iteration {iterations}"
    points = [*range(interval, iterations, interval)[:6], iterations]  # a run that ends only when it is stopped may have 10**9
    shown = ", ".join(map(str, points)) if len(points) <= 6 else f"{points[0]}, {points[1]}, ... {iterations}"
    return f"after iteration {shown}"


def _names(config: BaseConfig, sources: Sources) -> str:
    return ", ".join(config.shown(source.path) for source in as_sources(sources))
