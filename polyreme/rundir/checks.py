"""Everything that can be checked before processes start, by the core and by each installed service.

A service registers its check in the entry-point group `polyreme.checks`: a function of the configuration that yields notices
(str) and errors (PolyremeError). Raising an error ends the check. Checks of stages are in the group `polyreme.stage_checks`.

Invariant: a check starts no service, runs no user code, and changes nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points

from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme.errors import PolyremeError, results
from polyreme.net import tls
from polyreme.rundir.input_files import input_errors

GROUP = "polyreme.checks"
STAGE_GROUP = "polyreme.stage_checks"
MEMORY_GROUP = "polyreme.memory"
"""A report of memory: a function of the configuration and of a device's bytes (None: unknown), which yields the same."""


@dataclass(frozen=True)
class Findings:
    """The errors that prevent a run, and notices for its user."""

    errors: tuple[PolyremeError, ...]
    notices: tuple[str, ...]


def check_run(config: RunConfig | StageConfig, only: str | None = None) -> tuple[str, ...]:
    """Runs all checks and returns their notices. Raises their errors together.

    Args:
        only: name of the check of the one service that will certainly run on this machine, or None for all services. An error of
            another service becomes a notice, since that service may run on a different machine.
    """
    found = findings(config, only)
    raise_all(found.errors)
    return found.notices


def raise_all(errors: Sequence[PolyremeError]) -> None:
    """Raises the errors as one; nothing without any."""
    if errors:
        raise errors[0] if len(errors) == 1 else SeveralErrors(errors)


def findings(config: RunConfig | StageConfig, only: str | None = None) -> Findings:
    """The results of all checks; `only` as in `check_run`. A check without its input is left out, and no error is repeated."""
    errors: list[PolyremeError] = [*input_errors(config), *results(_security_errors(config))]
    notices: list[str] = []
    group = STAGE_GROUP if isinstance(config, StageConfig) else GROUP
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        for result in results(point.load()(config)):
            if isinstance(result, str):
                notices.append(result)
            elif str(result) in map(str, errors):
                continue
            elif only in (None, point.name):
                errors.append(result)
            else:
                notices.append(f"the {point.name} service cannot start on this machine: {result}")
    return Findings(tuple(errors), tuple(notices))


def _security_errors(config: RunConfig | StageConfig) -> Iterator[PolyremeError]:
    if isinstance(config, RunConfig) and config.security is not None:
        tls.check_files(config.security)
    yield from ()


def memory_report(config: RunConfig | StageConfig, device_bytes: int | None) -> Findings:
    """The services' estimates of their memory, without allocating: lines of text, and errors when a part cannot fit.

    Args:
        device_bytes: memory of a device; None: unknown.
    """
    points = sorted(entry_points(group=MEMORY_GROUP), key=lambda point: point.name)
    found = [result for point in points for result in results(point.load()(config, device_bytes))]
    errors = tuple(result for result in found if not isinstance(result, str))
    return Findings(errors, tuple(result for result in found if isinstance(result, str)))


class SeveralErrors(PolyremeError):
    """Several errors, printed on one line each."""

    exit_code = 2

    def __init__(self, errors: Sequence[PolyremeError]) -> None:
        super().__init__("a run that can start", f"{len(errors)} errors", "Fix them.")
        self.errors = tuple(errors)

    def __str__(self) -> str:
        return "\n".join([f"{len(self.errors)} errors", *(f"- {error}" for error in self.errors)])
