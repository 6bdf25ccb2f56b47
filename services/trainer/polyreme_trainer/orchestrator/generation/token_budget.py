"""The token budget of partial rollouts: a sample pauses after its budget of an iteration, and continues with the next version.
The turns of an episode have one budget, so that it pauses in a turn or between two.

Invariant: no policy version samples more than a sample's budget, except in groups that the learner's next plan needs. A paused
sample keeps its tokens, log-probabilities and versions; the replica that continues it computes the prefix again.
"""

import asyncio
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

from polyreme.experience.ledger import ExperienceLog, Unplanned
from polyreme_trainer.orchestrator.generation.partial_rollout_log import PartialRolloutLog
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollout, PartialRollouts, Span


@dataclass(frozen=True)
class NextPart:
    """The tokens that one call may add.

    Attributes:
        tokens: the maximum for each sample, by index; all other samples stay paused.
        min_version: the oldest version that may sample them.
    """

    tokens: dict[int, int]
    min_version: int


def next_part(unfinished: Sequence[PartialRollout], budget: int, version: int, others: Sequence[Span] = ()) -> NextPart:
    """Samples that may continue at the learner's `version`, and their limits. Empty when all used that version's budget. Pure.

    A sample that has used the budget of its newest version needs a newer one. All samples of a call share its `min_version`.

    Args:
        others: spans of an episode's other turns, whose tokens count too.
    """
    ready, min_version = [], 0
    for sample in unfinished:
        newest = max((span[0] for span in (*others, *sample.spans)), default=0)
        is_spent = _tokens_since((*others, *sample.spans), newest) >= budget
        if is_spent and newest >= version:
            continue
        ready.append(sample)
        min_version = max(min_version, version if is_spent else newest)
    left = {sample.index: budget - _tokens_since((*others, *sample.spans), min_version) for sample in ready}
    return NextPart(left, min_version)


def needed(unplanned: Unplanned, paused: Set[int], groups: int, staleness: int) -> set[int]:
    """The paused groups that must continue at once, because the learner waits for its next plan. Pure.

    Of the groups that iterations up to d must train, the next plan (iteration i) must take all but `groups` x (d - i), which
    later plans can still take. For example, with 4 groups per iteration, staleness 1 and i = 7: if 6 groups must be trained by
    iteration 8, then iteration 7 takes at least 2 of them. d = i + staleness gives the whole plan. If too few of them are ready
    or running, the oldest paused groups continue.
    """
    if unplanned.planned != unplanned.version:
        return set()
    found: set[int] = set()
    for later in range(staleness + 1):
        newest = unplanned.version + later - staleness  # the newest version that must be trained by iteration i + later
        flying = [index for version, index in unplanned.in_flight if version <= newest]
        ready = sum(version <= newest for version in unplanned.appended)
        must = len(flying) + ready - groups * later if later < staleness else groups
        running = sum(index not in paused or index in found for index in flying)
        waiting = [index for index in flying if index in paused and index not in found]
        found.update(waiting[: max(0, must - ready - running)])
    return found


@dataclass(eq=False)
class _Paused:
    """Samples of a group that wait together: all unfinished, or one episode's. `beyond`: they get a part beyond the budget."""

    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    beyond: bool = False


class TokenBudget:
    """The budget of all groups of a run.

    Args:
        tokens: the tokens of a sample per iteration.
        groups: the number of groups per iteration.
        staleness: the run's maximum staleness.
        experience: has the learner's version and the groups that its next plan can take.
        partial_log: saves paused groups.
        held: the version at which an evaluation holds the replicas, if any. Groups that have used its budget stay paused.
    """

    def __init__(
        self,
        tokens: int,
        groups: int,
        staleness: int,
        experience: ExperienceLog,
        partial_log: PartialRolloutLog,
        held: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.tokens, self._groups, self._staleness = tokens, groups, staleness
        self._held = held
        self._experience, self._partial_log = experience, partial_log
        self._paused: dict[int, list[_Paused]] = {}
        self._recorded: set[int] = set()  # groups that are paused in the log
        self._version, self._waited, self._beyond = -1, 0, 0
        self._new_pause, self._updating = asyncio.Event(), asyncio.Lock()

    async def next_part(self, index: int, rollouts: PartialRollouts, others: Callable[[], Sequence[Span]] = tuple) -> NextPart:
        """The tokens that the next call for a group or an episode may add. Waits while all its unfinished samples are paused.

        Args:
            others: the spans of the episode's other turns, which may grow.
        """
        is_beyond = False
        while True:
            unfinished = rollouts.unfinished()
            if (part := next_part(unfinished, self.tokens, self._version, others())).tokens:
                return part
            if is_beyond:
                self._beyond += 1
                return NextPart(dict.fromkeys((sample.index for sample in unfinished), self.tokens), 0)
            is_beyond = await self._pause(index, rollouts)

    def freed(self, index: int) -> None:
        """Lets the turns of a group's episodes that wait look again: another has ended, maybe before it used what it got."""
        for paused in self._paused.get(index, ()):
            paused.resumed.set()

    async def update(self) -> None:
        """Resumes the groups with a budget again, and those that the learner's next plan needs. Records which stay paused."""
        async with self._updating:
            self._resume(await self._experience.unplanned())
            still = self._waiting()
            if still != self._recorded:
                await self._experience.set_paused(still)
                self._recorded = still

    def _resume(self, unplanned: Unplanned) -> None:
        held = self._held()
        served = unplanned.version if held is None else min(unplanned.version, held)
        is_new, self._version = served != self._version, served
        others = unplanned.paused - self._recorded  # those of other orchestrators
        beyond = needed(unplanned, self._waiting() | others, self._groups, self._staleness)
        for index, waiting in self._paused.items():
            for paused in waiting:
                paused.beyond |= index in beyond
                if is_new or paused.beyond:
                    paused.resumed.set()

    def _waiting(self) -> set[int]:
        """The groups that do not end without a newer version or a part beyond the budget."""
        return {index for index, waiting in self._paused.items() if not all(paused.resumed.is_set() for paused in waiting)}

    async def follow_pauses(self) -> None:
        """Saves each group that pauses, and updates. Never returns."""
        while True:
            await self._new_pause.wait()
            self._new_pause.clear()
            await self._partial_log.save(self._paused.keys())
            await self.update()

    def take(self) -> dict[str, tuple[float, int]]:
        """The counts of an iteration's metrics since the last call: the number of samples that waited after using their budget,
        and of parts beyond it."""
        waited, beyond = self._waited, self._beyond
        self._waited = self._beyond = 0
        return {"rollout/paused_samples": (waited, 0), "rollout/parts_beyond_budget": (beyond, 0)}

    async def _pause(self, index: int, rollouts: PartialRollouts) -> bool:
        """Returns whether a part beyond the budget follows."""
        paused = _Paused()
        self._paused.setdefault(index, []).append(paused)
        self._waited += len(rollouts.unfinished())
        self._new_pause.set()
        try:
            await paused.resumed.wait()
        finally:  # also when the attempt has expired, or the run ends
            self._paused[index].remove(paused)
            if not self._paused[index]:
                del self._paused[index]
        return paused.beyond


def _tokens_since(spans: Sequence[Span], version: int) -> int:
    """The number of tokens that `version` or newer versions sampled."""
    return sum(end - start for each, start, end in spans if each >= version)
