"""Everything that can be checked before processes start, by the core and by each installed service.

A service registers its check in the entry-point group `polyreme.checks`: a function of the configuration that yields notices (str) and
errors (PolyremeError). Raising an error ends the check. Checks of stages are in the group `polyreme.stage_checks`.

Invariant: a check starts no service, runs no user code, and changes nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from polyreme.cli.input_files import check_inputs, check_stage_inputs
from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.errors import PolyremeError
from polyreme.net import tls

GROUP = "polyreme.checks"
STAGE_GROUP = "polyreme.stage_checks"
MEMORY_GROUP = "polyreme.memory"
"""A report of memory: a function of the configuration and of a device's bytes (None: unknown), which yields the same."""
Check = Callable[..., Iterator[str | PolyremeError]]
"""A check: takes a RunConfig, or a StageConfig in the group of stages."""


@dataclass(frozen=True)
class Findings:
    """The errors that prevent a run, and notices for its user."""

    errors: tuple[PolyremeError, ...]
    notices: tuple[str, ...]


def check_run(config: RunConfig | StageConfig, only: str | None = None) -> tuple[str, ...]:
    """Runs all checks and returns their notices. Raises the first error.

    Args:
        only: name of the check of the one service that will certainly run on this machine, or None for all services. An error of another
            service becomes a notice, since that service may run on a different machine.
    """
    found = findings(config, only)
    if found.errors:
        raise found.errors[0]
    return found.notices


def findings(config: RunConfig | StageConfig, only: str | None = None) -> Findings:
    """The results of all checks; `only` as in `check_run`. The services' checks run only after the files that they read are found."""
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
                notices.append(f"the {point.name} service cannot start on this machine: {result}")
    return Findings(tuple(errors), tuple(notices))


def memory_report(config: RunConfig | StageConfig, device_bytes: int | None) -> Findings:
    """The services' estimates of their memory, without allocating: lines of text, and errors when a part cannot fit.

    Args:
        device_bytes: memory of a device; None: unknown.
    """
    points = sorted(entry_points(group=MEMORY_GROUP), key=lambda point: point.name)
    results = [result for point in points for result in _results(point.load(), config, device_bytes)]
    errors = tuple(result for result in results if not isinstance(result, str))
    return Findings(errors, tuple(result for result in results if isinstance(result, str)))


def _results(check: Check, *arguments: Any) -> Iterator[str | PolyremeError]:
    try:
        yield from check(*arguments)
    except PolyremeError as error:
        yield error
