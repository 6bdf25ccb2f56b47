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

GROUP = "polyreme.checks"
Check = Callable[[RunConfig], Iterator[str | PolyremeError]]


@dataclass(frozen=True)
class Findings:
    """What is wrong with a run, and what its user should know."""

    errors: tuple[PolyremeError, ...]
    notices: tuple[str, ...]


def check_run(config: RunConfig) -> tuple[str, ...]:
    """The notices of all checks. Raises the first error."""
    found = findings(config)
    if found.errors:
        raise found.errors[0]
    return found.notices


def findings(config: RunConfig) -> Findings:
    """What all checks find. The services are asked once the files that they read are there."""
    try:
        check_inputs(config)
    except PolyremeError as error:
        return Findings((error,), ())
    points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    results = [result for point in points for result in _results(point.load(), config)]
    return Findings(
        tuple(result for result in results if isinstance(result, PolyremeError)),
        tuple(result for result in results if isinstance(result, str)),
    )


def _results(check: Check, config: RunConfig) -> Iterator[str | PolyremeError]:
    try:
        yield from check(config)
    except PolyremeError as error:
        yield error
