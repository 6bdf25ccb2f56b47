"""The reward service's part of `polyreme doctor`: the sandbox in which programs of the reward `code` would run.

Invariant: a sandbox counts only after a program has tried to leave it.
"""

from collections.abc import Iterator, Mapping

from polyreme.isolation.sandbox.modes import why_not
from polyreme.isolation.sandbox.program import Mode
from polyreme.terminal.verdicts import Verdict

_MODES = (Mode.BUBBLEWRAP, Mode.LANDLOCK)


def verdicts(_wanted: str | None) -> Iterator[Verdict]:
    """Checks whether this machine can run programs of rewards. They run on the processor with any device."""
    yield sandbox_verdict({mode: why_not(mode) for mode in _MODES})


def sandbox_verdict(reasons: Mapping[Mode, str | None]) -> Verdict:
    """Returns the verdict with the first working mode. Args: reasons: why each mode does not work; None: it works."""
    failures = "; ".join(f"{mode}: {reason}" for mode, reason in reasons.items() if reason is not None)
    working = [mode for mode in _MODES if reasons[mode] is None]
    if not working:
        advice = (
            "The reward `code` and the tool `python` will not start; others do. Allow user namespaces (docs/deploy.md), or use"
            " Linux 5.13 or newer."
        )
        return Verdict("note", "sandbox", failures, advice)
    return Verdict("ok", "sandbox", str(working[0]) + (f" ({failures})" if failures else ""))
