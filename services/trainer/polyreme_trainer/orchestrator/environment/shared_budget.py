"""The token budget of an episode, which its turns share.

Invariant: what a running call may still add counts for the other turns until it has ended.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

from polyreme_trainer.orchestrator.environment.episode_clock import EpisodeClock
from polyreme_trainer.orchestrator.environment.trajectories import Trajectories
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollouts, Span
from polyreme_trainer.orchestrator.generation.token_budget import NextPart, TokenBudget

_UNGRANTED = -1


class SharedBudget:
    """The budget of the run, for an episode of a group; None: there is none."""

    def __init__(self, budget: TokenBudget | None, group: int, trajectories: Trajectories) -> None:
        self._budget, self._group, self._trajectories = budget, group, trajectories
        self._running: dict[int, tuple[PartialRollouts, int]] = {}  # turns, with the minimum version of their newest call

    @contextmanager
    def turn(self, number: int, rollouts: PartialRollouts) -> Iterator[PartialRollouts]:
        """Counts a turn's tokens while they are sampled."""
        self._running[number] = rollouts, _UNGRANTED
        try:
            yield rollouts
        finally:
            del self._running[number]
            if self._budget is not None:
                self._budget.freed(self._group)

    def next_part(self, number: int, clock: EpisodeClock) -> Callable[[PartialRollouts], Awaitable[NextPart]] | None:
        """What grants the tokens of a turn's next call, and waits for them; None: all. The wait costs the episode no time."""
        return None if self._budget is None else partial(self._granted, self._budget, number, clock)

    async def _granted(self, budget: TokenBudget, number: int, clock: EpisodeClock, rollouts: PartialRollouts) -> NextPart:
        with clock.standing():
            part = await budget.next_part(self._group, rollouts, partial(self._spans_beside, number))
        self._running[number] = rollouts, part.min_version
        return part

    def _spans_beside(self, number: int) -> list[Span]:
        """The spans of the episode's other turns, with one for the tokens that a running call may still add."""
        found = [span for each in self._trajectories for sample in each.sampled for span in sample.spans]
        for rollouts, version in (part for turn, part in self._running.items() if turn != number):
            found += [span for sample in rollouts.samples for span in sample.spans]
            found += [(version, 0, rollouts.missing_tokens())] if version != _UNGRANTED else []
        return found
