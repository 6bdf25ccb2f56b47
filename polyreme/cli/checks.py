"""Everything that can be checked before processes start, by the core and by each service installed here.

A service registers its check in the entry-point group `polyreme.checks`: a function of the configuration that yields notices (text)
and errors (PolyremeError). It may also raise one, after which it has nothing more to say.

Invariant: a check starts no service, runs no code of the user's, and changes nothing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points

from polyreme.cli.run_directory import check_inputs
from polyreme.config.run import RunConfig
from polyreme.errors import PolyremeError
from polyreme.net import tls

GROUP = "polyreme.checks"
Check = Callable[[RunConfig], Iterator[str | PolyremeError]]


@dataclass(frozen=True)
class Findings:
    """What is wrong with a run, and what its user should know."""

    errors: tuple[PolyremeError, ...]
    notices: tuple[str, ...]


def check_run(config: RunConfig, only: str | None = None) -> tuple[str, ...]:
    """The notices of all checks. Raises the first error.

    Args:
        only: the one service that this machine is sure to run, by the name of its check; None: all. What another service lacks here
            is a notice then: it may run on a machine that has it.
    """
    found = findings(config, only)
    if found.errors:
        raise found.errors[0]
    return found.notices


def findings(config: RunConfig, only: str | None = None) -> Findings:
    """What all checks find; `only` as in `check_run`. The services are asked once the files that they read are there."""
    try:
        check_inputs(config)
        if config.security is not None:
            tls.check_files(config.security)
    except PolyremeError as error:
        return Findings((error,), ())
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
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


def _results(check: Check, config: RunConfig) -> Iterator[str | PolyremeError]:
    try:
        yield from check(config)
    except PolyremeError as error:
        yield error
