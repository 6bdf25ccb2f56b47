"""The reward service's check before a run starts: sources, options, and the columns that rewards need.

Invariant: the check reads but never runs a user's reward, and its work is bounded: it reads only the first rows of a long file.
"""

import ast
import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import islice

from polyreme.config.data import DataConfig, Sources
from polyreme.config.evaluation import PART, EvaluationSet, best_metric, without_part
from polyreme.config.python_source import FUNCTIONS, find_source, parse, stand_in_for
from polyreme.config.reward import RewardConfig, RewardSpec
from polyreme.config.run import RunConfig
from polyreme.dataset.columns import column_names, label_text, value_at
from polyreme.dataset.source import as_sources, name_of, read_objects
from polyreme.errors import ConfigError, DataError, PolyremeError
from polyreme.net import tls
from polyreme.rundir.input_files import is_there
from polyreme_reward.build import correctness, is_builtin, read_file
from polyreme_reward.metrics import RewardMetrics
from polyreme_reward.model.reward import ModelReward
from polyreme_reward.plugins.load import ENTRY_POINTS, USUAL_NAMES, choose_function, no_function
from polyreme_reward.plugins.signatures import LABEL_NAMES, adapt
from polyreme_reward.rules import BUILTINS, check_rule

_ROWS = 20_000


@dataclass(frozen=True)
class Need:
    """The columns that a reward needs, of which a row must have at least one; "label" stands for data.label_key.

    Attributes:
        columns: names of columns; empty: the reward needs none.
        optional: whether the reward can do without: then only rows that differ from the others are worth a notice.
    """

    columns: tuple[str, ...] = ()
    optional: bool = False


def check(config: RunConfig) -> Iterator[str | PolyremeError]:
    """Yields notices and errors about a run's rewards."""
    if (section := config.reward) is None:
        return
    needs: dict[str, Need] = {}
    if section.security not in (None, config.security):  # the core checks the run's section
        try:
            tls.check_files(section.security)
        except ConfigError as error:
            yield error
    for spec in section.rewards:
        try:
            needs[spec.label] = _check_source(spec, section)
        except ConfigError as error:
            yield error
    if len(needs) == len(section.rewards):
        for sources in (config.data.train, *(each.data for each in config.evaluation_sets if config.is_rewarded(each))):
            for source in filter(is_there, as_sources(sources)):  # the core reports one that is not
                yield from _check_rows((source,), section, config.data, needs)
        yield from _check_best(config, section)


def _check_source(spec: RewardSpec, config: RewardConfig) -> Need:
    """Returns the columns that the reward needs. Raises ConfigError when the reward cannot be loaded."""
    if spec.url is not None:
        from polyreme_reward.remote.reward import HttpReward  # imports httpx, so only when needed

        remote = HttpReward(spec.label, spec.weight, spec.urls, str(spec.protocol), 1.0, spec.options, spec.security)
        asyncio.run(remote.close())
        return Need(("label",), optional=True)
    elif spec.model is not None:
        ModelReward(spec.label, spec.weight, spec.model, spec.options, 1.0, 1.0, config.worker_memory_mib, RewardMetrics())
    elif is_builtin(spec):
        if spec.name in BUILTINS or not entry_points(group=ENTRY_POINTS, name=str(spec.name)):
            return Need(check_rule(str(spec.name), spec.options).needs)
    else:
        path = spec.file or find_source(str(spec.module))
        function = stand_in(read_file(path), str(spec.file or spec.module), spec.function) if path else None
        if function is not None:
            convention = adapt(function, spec.options).convention
            parameters = inspect.signature(function).parameters.values()
            named = {p.name: p.default is p.empty for p in parameters if p.name in LABEL_NAMES and p.name not in spec.options}
            columns = ("label", *sorted(named)) if convention == "trl" else ("label",)
            return Need(columns, optional=not any(named.values())) if named else Need()
    return Need()


def _check_best(config: RunConfig, section: RewardConfig) -> Iterator[PolyremeError]:
    """Yields an error when `eval_best` names a metric that its held-out set cannot have with these rewards."""
    if config.eval_best is None:
        return
    settings, metric = best_metric(config.evaluation_sets, config.eval_best, config.part_names)
    if not config.is_rewarded(settings):
        return
    try:
        used = _used_rewards(settings, section)
    except DataError:  # an error of its own
        return
    names, found = settings.metrics([*used, *([PART] if config.environment else ())]), f"eval_best: {config.eval_best}"
    if len(section.rewards) > 1 or not correctness(section.rewards[0]) or section.rewards[0].weight != 1:
        names = [name for name in names if not name.startswith("pass@")]
        found += ", which needs a single built-in reward of weight 1 that is 1 for right and 0 for wrong" * metric.startswith(
            "pass@"
        )
    if without_part(metric, config.part_names) not in names:
        yield ConfigError(
            f"a metric that the held-out set {settings.name or 'data.eval'} can have: {', '.join(map(settings.metric, names))}",
            found + f", which no row of the set names in {section.choose_by}" * metric.startswith("reward/"),
            "Set eval_best to one of these.",
        )


def _used_rewards(settings: EvaluationSet, section: RewardConfig) -> Sequence[str]:
    """The names of the rewards that score a held-out set, in their order. Raises DataError."""
    known = [spec.label for spec in section.rewards]
    if section.choose_by is None or not all(map(is_there, as_sources(settings.data))):
        return known
    rows = islice(read_objects(settings.data), settings.samples)
    used = {name for where, fields in rows for name in _rewards_of(fields, section, where)}
    return [name for name in known if name in used]


def _check_rows(
    sources: Sources, section: RewardConfig, data: DataConfig, needs: dict[str, Need]
) -> Iterator[str | PolyremeError]:
    """Yields notices and errors about rows that lack columns their rewards need."""
    asked, lacking, first = Counter[str](), Counter[str](), list[str]()
    try:
        for where, fields in islice(read_objects(sources), _ROWS):
            first = first or column_names(fields)
            for name in _rewards_of(fields, section, where):
                asked[name] += 1
                lacking[name] += not _has(fields, needs[name], data)
    except DataError as error:
        yield error
        return
    for name, count in lacking.items():
        if not count or (needs[name].optional and count == asked[name]):
            continue
        columns = " or ".join(dict.fromkeys(data.label_key if need == "label" else need for need in needs[name].columns))
        found = f"{asked[name] - count} of {asked[name]} rows have one"
        if count == asked[name]:
            yield DataError(
                f"a column {columns} in {name_of(sources)}, for the reward {name}",
                f"{found}; the columns are {', '.join(first)}",
                "Add the column, set data.label_key to the column with the reference answers, or choose another reward. A"
                " function that can do without has a default: `label=None`.",
            )
        else:
            yield f"the reward {name} reads the column {columns}: {found} in {name_of(sources)}"


def _rewards_of(fields: Mapping[str, object], config: RewardConfig, where: str) -> Sequence[str]:
    """The names of the rewards that score a row. Raises DataError when the row names an unknown reward."""
    known = [spec.label for spec in config.rewards]
    if config.choose_by is None:
        return known
    named = fields.get(config.choose_by)
    names = [named] if isinstance(named, str) else named
    if isinstance(names, list):
        names = [config.choices.get(name, name) if isinstance(name, str) else name for name in names]
    if not isinstance(names, list) or not names or not all(name in known for name in names):
        raise DataError(
            f"names of rewards ({', '.join(known)}) in the column {config.choose_by!r} in {where}",
            f"{named!r:.80}",
            "Fix the row, or reward.choose_by.",
        )
    return list(dict.fromkeys(names))


def _has(fields: Mapping[str, object], need: Need, data: DataConfig) -> bool:
    if not need.columns or any(fields.get(column) is not None for column in need.columns if column != "label"):
        return True
    if "label" not in need.columns:
        return False
    try:
        return label_text(value_at(fields, data.label_key)) != ""
    except TypeError:  # the trainer's check refuses such a row
        return True


def stand_in(code: str, where: str, name: str | None) -> Callable[..., object] | None:
    """A function with the name and parameters of a module's reward function, whose source is only parsed. It must not be called.

    Args:
        code: the module's text.
        where: name of the module for errors.
        name: name of the function, or None to choose it as `load` does.

    Returns:
        The function, or None when the source does not determine it, since the name is assigned, imported, decorated or a class.

    Raises:
        ConfigError: the text is not valid Python, or it does not have the function.
    """
    bound = parse(code, where)
    public = [key for key, node in bound.items() if isinstance(node, FUNCTIONS) and not key.startswith("_")]
    if name is not None:
        if not {name, "*"} & bound.keys():
            raise no_function(name, public, where)
        chosen = name
    else:
        values = [key for key, node in bound.items() if not isinstance(node, (*FUNCTIONS, ast.Import, ast.ImportFrom))]
        if set(USUAL_NAMES) & set(values) or (values and not public):
            return None
        chosen = choose_function(public, where)
    node = bound.get(chosen)
    return stand_in_for(node) if isinstance(node, FUNCTIONS) and not node.decorator_list else None
