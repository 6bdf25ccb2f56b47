"""What the other orchestrators tell the leading one, which writes the records of all.

Invariant: each tells all that it has done in its term, so a lost or late report is made up for by the next one.
"""

from polyreme.experience.ledger import ExperienceLog
from polyreme_trainer.orchestrator.groups.counts import OrchestratorWork


class Reports:
    """The reports of one run. `experience`: with the orchestrator's term."""

    def __init__(self, experience: ExperienceLog) -> None:
        self._experience, self._shard = experience, experience.shard
        self._done = OrchestratorWork()  # in the term, of an orchestrator that does not lead
        self._seen: dict[int, tuple[int, OrchestratorWork]] = {}  # number -> term and progress at the last look

    async def add(self, done: OrchestratorWork) -> None:
        """Tells the leading orchestrator what this one has done since the last call."""
        self._done += done
        await self._experience.report(self._done.line())

    async def since(self) -> list[OrchestratorWork]:
        """What each of the others has done since the last call, by number; at the first call since it began."""
        lines = await self._experience.reports() if self._shard.count > 1 else {}
        found = []
        for number in range(1, self._shard.count):
            term, line = lines.get(number, (0, OrchestratorWork().line()))
            now = OrchestratorWork.parse(line)
            seen_term, seen = self._seen.get(number, (0, OrchestratorWork()))
            found.append(now + -seen if seen_term == term else now)
            self._seen[number] = term, now
        return found
