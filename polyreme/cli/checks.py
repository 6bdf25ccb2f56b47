"""Everything that can be checked before processes start, by the core and by each service installed here.

A service registers its check in the entry-point group `polyreme.checks`: a function of the configuration that yields notices (text)
and errors (PolyremeError). It may also raise one, after which it has nothing more to say. Checks of stages are in the group
`polyreme.stage_checks`.

Invariant: a check starts no service, runs no code of the user's, and changes nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from polyreme.cli.run_directory import check_inputs, check_stage_inputs
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.errors import PolyremeError
from polyreme.net import tls

GROUP = "polyreme.checks"
STAGE_GROUP = "polyreme.stage_checks"
Check = Callable[[Any], Iterator[str | PolyremeError]]
"""Of a RunConfig, or in the group of stages of a StageConfig."""


@dataclass(frozen=True)
class Findings:
    """What is wrong with a run, and what its user should know."""

    errors: tuple[PolyremeError, ...]
    notices: tuple[str, ...]


def check_run(config: RunConfig | StageConfig, only: str | None = None) -> tuple[str, ...]:
    """The notices of all checks. Raises the first error.

    Args:
        only: the one service that this machine is sure to run, by the name of its check; None: all. What another service lacks here
            is a notice then: it may run on a machine that has it.
    """
    found = findings(config, only)
    if found.errors:
        raise found.errors[0]
    return found.notices


def findings(config: RunConfig | StageConfig, only: str | None = None) -> Findings:
    """What all checks find; `only` as in `check_run`. The services are asked once the files that they read are there."""
    try:
        if isinstance(config, StageConfig):
            check_stage_inputs(config)
        else:
            check_inputs(config)
            if config.security is not None:
                tls.check_files(config.security)
    except PolyremeError as error:
        return Findings((error,), ())
    group = STAGE_GROUP if isinstance(config, StageConfig) else GROUP
    points = sorted(entry_points(group=group), key=lambda point: point.name)
    errors: list[PolyremeError] = []
    notices: list[str] = []
    for point in points:
        for result in _results(point.load(), config):
            if isinstance(result, str):
                notices.append(result)
            elif only in (None, point.name):
                errors.append(result)
            else:
                notices.append(f"the {point.name} service could not start here: {result}")
    return Findings(tuple(errors), tuple(notices))


def _results(check: Check, config: RunConfig | StageConfig) -> Iterator[str | PolyremeError]:
    try:
        yield from check(config)
    except PolyremeError as error:
        yield error
