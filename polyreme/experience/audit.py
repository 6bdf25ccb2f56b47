"""Checks from the log alone that no group was lost and no group is trained twice.

Invariant: an audit is a pure function of one snapshot of the log. The ledger keeps one short row per group and every plan for the
whole run; only payloads are deleted. So the audit needs no counters: it checks each row against plans, payloads and queues.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from polyreme.experience.listing import attached
from polyreme.experience.run import Run

STATES = ("admitted", "appended", "planned", "released", "dropped", "failed")


@dataclass(frozen=True)
class Audit:
    """The result of an audit. All lists are empty for an intact log.

    Attributes:
        counts: number of groups by state: admitted, appended, planned, released, dropped, failed.
        missing: indices without a row although a later index has one.
        double: indices in more than one plan.
        lost: indices whose payload is needed but does not exist.
        leftover: indices whose payload exists but is no longer needed.
        contradictions: descriptions of rows, plans, queues and partial rollouts that disagree.
    """

    run_id: str
    state: str
    version: int
    planned: int
    counts: dict[str, int]
    missing: list[int] = field(default_factory=list)
    double: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    leftover: list[int] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.missing or self.double or self.lost or self.leftover or self.contradictions)


@dataclass(frozen=True)
class LogSnapshot:
    """A run's log at one instant."""

    run_id: str
    meta: dict[str, str]
    rows: dict[int, list[str]]
    plans: dict[int, list[int]]
    payloads: set[int]
    in_flight: dict[int, int]
    appended: dict[int, int]
    partial_rollouts: dict[str, str]

    @classmethod
    async def take(cls, run: Run) -> "LogSnapshot":
        """Reads the log atomically, without the contents of payloads and partial rollouts."""
        meta, ledger, plans, payloads, in_flight, appended, partial = await run.scripts.call("snapshot")
        return cls(
            run.run_id,
            {name.decode(): value.decode() for name, value in _pairs(meta)},
            {int(index): row.decode().split(" ") for index, row in _pairs(ledger)},
            {int(iteration): [int(word) for word in text.split()] for iteration, text in _pairs(plans)},
            {int(index) for index in payloads},
            {int(member): int(score) for member, score in _pairs(in_flight)},
            {int(member): int(score) for member, score in _pairs(appended)},
            {field.decode(): value.decode() for field, value in _pairs(partial)},
        )

    def number(self, field_name: str, absent: int) -> int:
        return int(self.meta.get(field_name, absent))

    def state_of(self, index: int) -> str:
        """The state of an index that has a row. A planned group whose iteration was released is `released`."""
        state = self.rows[index][0]
        if state == "planned" and int(self.rows[index][3]) <= self.number("released", -1):
            return "released"
        return state

    def audit(self) -> Audit:
        states = {index: self.state_of(index) for index in self.rows}
        times = Counter(index for indices in self.plans.values() for index in indices)
        needed = {index for index, state in states.items() if state in ("appended", "planned")}
        base = self.number("base", 0)
        return Audit(
            run_id=self.run_id,
            state=self.meta.get("state", ""),
            version=self.number("version", -1),
            planned=base + len(self.plans),
            counts={state: sum(found == state for found in states.values()) for state in STATES},
            missing=sorted(set(range(self.number("first_group", 0), max(self.rows, default=-1) + 1)) - set(self.rows)),
            double=sorted(index for index, count in times.items() if count > 1),
            lost=sorted(needed - self.payloads),
            leftover=sorted(self.payloads - needed),
            contradictions=self._contradictions(states),
        )

    def _contradictions(self, states: dict[int, str]) -> list[str]:
        found = []
        for name, queue in (("admitted", self.in_flight), ("appended", self.appended)):
            rows = {index: int(self.rows[index][2]) for index, state in states.items() if state == name}
            found += [f"group {index} is {name}, but its queue disagrees" for index in rows if rows[index] != queue.get(index)]
            found += [f"group {index} is queued as {name}, but its row disagrees" for index in queue if index not in rows]
        in_plans = {index: iteration for iteration, indices in self.plans.items() for index in indices}
        in_rows = {index: int(row[3]) for index, row in self.rows.items() if row[0] == "planned"}
        for index in sorted(in_plans.keys() | in_rows.keys()):
            if in_plans.get(index) != in_rows.get(index):
                found.append(f"group {index} is in plan {in_plans.get(index)}, but its row has plan {in_rows.get(index)}")
        base = self.number("base", 0)
        if set(self.plans) != set(range(base + 1, base + 1 + len(self.plans))):
            found.append(f"plans are not consecutive from iteration {base + 1}")
        size = self.number("groups_per_iteration", 0)
        found += [f"plan {i} has {len(ids)} groups, not {size}" for i, ids in sorted(self.plans.items()) if len(ids) != size]
        low = self.number("low_water", 0)
        found += [
            f"group {index} is {state} although it is below the low-water mark {low}"
            for index, state in sorted(states.items())
            if index < low and state in ("admitted", "appended", "planned")
        ]
        return found + self._stray_partial_rollouts()

    def _stray_partial_rollouts(self) -> list[str]:
        """Partial rollouts without an attempt in flight, and parts without a partial rollout."""
        found: list[str] = []
        heads = {name: value for name, value in self.partial_rollouts.items() if ":" not in name}
        parts = self.partial_rollouts.keys() - heads.keys()
        for name, head in heads.items():
            attempt, count = head.split(" ")
            row = self.rows.get(int(name), ["none"])
            if row[:2] != ["admitted", attempt]:
                found.append(f"group {name} has a partial rollout of attempt {attempt}, but its row is {' '.join(row[:2])}")
            own = {f"{name}:{number}" for number in range(int(count))}
            if own - parts:
                found.append(f"group {name} has a partial rollout with missing parts")
            parts = parts - own
        return found + [f"part {part} belongs to no partial rollout" for part in sorted(parts)]


def _pairs(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def title(audit: Audit) -> str:
    """The run and its state on one line, which is not wrapped, so that the run id can be copied."""
    return f"run {audit.run_id} ({audit.state}): version {audit.version}, planned {audit.planned}"


def render(audit: Audit) -> Table:
    """The audit as a table for the terminal."""
    table = Table()
    table.add_column("groups")
    table.add_column("count", justify="right")
    table.add_column("which")
    for state in STATES:
        table.add_row(state, str(audit.counts[state]), "")
    table.add_section()
    for name in ("missing", "double", "lost", "leftover"):
        indices: list[int] = getattr(audit, name)
        table.add_row(name, str(len(indices)), " ".join(map(str, indices[:20])) + (" ..." if len(indices) > 20 else ""))
    table.add_row("contradictions", str(len(audit.contradictions)), "\n".join(audit.contradictions[:20]))
    table.add_section()
    table.add_row("[green]whole" if audit.clean else "[red]NOT WHOLE", str(sum(audit.counts.values())), "")
    return table


async def audit_main(redis_url: str, run_id: str | None) -> int:
    """Prints the audit of a run, or of the newest when `run_id` is None. Returns the exit status: 0 if the log is intact, else 1.

    Raises:
        StoreError: Redis cannot be reached.
        UnavailableError: Redis does not have the run.
    """
    async with attached(redis_url, run_id, wait=0) as run:
        result = (await LogSnapshot.take(run)).audit()
    console = Console()
    console.print(title(result), soft_wrap=True, highlight=False, markup=False)
    console.print(render(result))
    return 0 if result.clean else 1
