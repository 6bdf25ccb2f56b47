"""What the orchestrators of a run have done between two plans. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from polyreme.experience.metric_records import Line

Counts = Mapping[str, tuple[float, int]]
"""By the name of a metric: a sum, and how many numbers the metric is the mean of; 0: the metric is the sum itself."""


def total(parts: Iterable[Counts]) -> dict[str, tuple[float, int]]:
    """The sums of all parts."""
    found: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (number, count) in part.items():
            before, counted = found.get(name, (0, 0))
            found[name] = before + number, counted + count
    return found


@dataclass(frozen=True)
class OrchestratorWork:
    """What an orchestrator has done for a time.

    Attributes:
        groups: the groups that it has brought into the log.
        idle_seconds, seconds: for which a replica had no call of it, as a mean over the replicas; and in total.
        counts: see `Counts`.
    """

    groups: int = 0
    idle_seconds: float = 0.0
    seconds: float = 0.0
    counts: Counts = field(default_factory=dict)

    @classmethod
    def parse(cls, line: Line) -> "OrchestratorWork":
        """Reads what `line` has written."""
        counts = {name: (number, count) for name, (number, count) in line["counts"].items()}
        return cls(line["groups"], line["idle_seconds"], line["seconds"], counts)

    def line(self) -> Line:
        """The JSON object."""
        return asdict(self)

    def __add__(self, more: "OrchestratorWork") -> "OrchestratorWork":
        counts = total((self.counts, more.counts))
        return OrchestratorWork(
            self.groups + more.groups, self.idle_seconds + more.idle_seconds, self.seconds + more.seconds, counts
        )

    def __neg__(self) -> "OrchestratorWork":
        counts = {name: (-number, -count) for name, (number, count) in self.counts.items()}
        return OrchestratorWork(-self.groups, -self.idle_seconds, -self.seconds, counts)


def metrics_of(own: OrchestratorWork, others: Sequence[OrchestratorWork]) -> dict[str, float]:
    """The metrics of an iteration: those that were counted, and how long replicas waited for work. That is known for each
    orchestrator's own calls only, so it is the wait for the one that kept them busiest, as a share of the time of `own`."""
    waits = [own.seconds * each.idle_seconds / each.seconds for each in others if each.seconds > 0]
    counts = total((own.counts, *(each.counts for each in others)))
    numbers = {name: number / count if count else number for name, (number, count) in counts.items()}
    return {"time/rollout_wait": min([own.idle_seconds, *waits]), **numbers}
