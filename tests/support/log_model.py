"""A model of the experience log in plain Python: the required behaviour of the Lua scripts, without Redis, atomicity or terms."""

from dataclasses import dataclass, field

from polyreme.experience.shard import Shard


class Stale(Exception):
    """StaleAttemptError in the real log."""


class Illegal(Exception):
    """TransitionError in the real log."""


@dataclass
class Group:
    state: str  # admitted, appended, planned, dropped, failed
    attempt: int
    version: int  # version of its admission; once appended, of its oldest token
    iteration: int = 0


@dataclass
class LogModel:
    size: int  # groups per iteration
    staleness: int
    max_attempts: int
    iterations: int
    base: int = 0
    version: int = -1
    released: int = -1
    low_water: int = 0
    groups: list[Group] = field(default_factory=list)
    plans: dict[int, list[int]] = field(default_factory=dict)
    drafts: dict[int, list[bytes]] = field(default_factory=dict)
    paused: set[int] = field(default_factory=set)
    judged: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # samples and solved of a prompt's groups, in order

    @property
    def planned(self) -> int:
        return self.base + len(self.plans)

    def those(self, state: str) -> list[int]:
        return [index for index, group in enumerate(self.groups) if group.state == state]

    def payloads(self) -> set[int]:
        kept = {index for index in self.those("planned") if self.groups[index].iteration > self.released}
        return kept | set(self.those("appended"))

    def pass_rates(self) -> dict[str, tuple[int, int, int]]:
        """Samples, solved and streak of every prompt."""
        return {
            prompt: (sum(n for n, _ in groups), sum(k for _, k in groups), streak(groups))
            for prompt, groups in self.judged.items()
        }

    # -- orchestrator

    def admit(self, most: int) -> list[tuple[int, int, int]]:
        last_iteration = min(self.version + 1 + self.staleness, self.iterations)
        room = (last_iteration - self.planned) * self.size - len(self.those("admitted")) - len(self.those("appended"))
        first = len(self.groups)
        if self.version >= 0:
            self.groups += [Group("admitted", 1, self.version) for _ in range(min(most, room))]
        return [(index, 1, self.version) for index in range(first, len(self.groups))]

    def readmit(self, index: int, attempt: int) -> tuple[int, int, int] | None:
        group = self._group(index)
        if group.state == "failed" and group.attempt == attempt:
            return None
        if group.state != "admitted" or group.attempt not in (attempt, attempt + 1):
            raise Stale
        if group.attempt == attempt:
            self._next_attempt(index)
        return None if group.state == "failed" else (index, group.attempt, group.version)

    def draft(self, index: int, attempt: int, number: int, part: bytes) -> None:
        if index < len(self.groups) and (self.groups[index].state, self.groups[index].attempt) == ("admitted", attempt):
            parts = self.drafts.get(index, [])
            if number > len(parts):
                raise Illegal
            self.drafts[index] = [*parts[:number], part]

    def set_paused(self, indices: set[int], shard: Shard) -> None:
        own = {index for index in self.those("admitted") if shard.owns(index)}
        self.paused = (self.paused - own) | (indices & own)

    def append(self, index: int, attempt: int, oldest_version: int, tally: tuple[str, int, int] | None = None) -> bool:
        group = self._group(index)
        if index < self.low_water or (group.state in ("appended", "planned") and group.attempt == attempt):
            return False
        if group.state != "admitted" or group.attempt != attempt:
            raise Stale
        if oldest_version < group.version:
            raise Illegal
        group.state, group.version = "appended", oldest_version
        self.paused.discard(index)
        self.drafts.pop(index, None)
        self._judge(tally)
        return True

    def drop(self, index: int, attempt: int, tally: tuple[str, int, int] | None = None) -> bool:
        group = self._group(index)
        if index < self.low_water or (group.state == "dropped" and group.attempt == attempt):
            return False
        if group.state != "admitted" or group.attempt != attempt:
            raise Stale
        group.state = "dropped"
        self.paused.discard(index)
        self.drafts.pop(index, None)
        self._judge(tally)
        return True

    def _judge(self, tally: tuple[str, int, int] | None) -> None:
        if tally is not None:
            prompt, samples, solved = tally
            self.judged.setdefault(prompt, []).append((samples, solved))

    def _group(self, index: int) -> Group:
        if index >= len(self.groups):
            raise Illegal
        return self.groups[index]

    def _next_attempt(self, index: int) -> None:
        group = self.groups[index]
        self.drafts.pop(index, None)
        self.paused.discard(index)
        if group.attempt >= self.max_attempts:
            group.state = "failed"
        else:
            group.attempt, group.version = group.attempt + 1, max(group.version, self.version)

    # -- learner

    def begin(self, version: int) -> None:
        if not self.plans:
            self.base = self.released = version
        elif not self.released <= version <= self.planned:
            raise Illegal
        self.version = version

    def set_version(self, version: int) -> None:
        if version == self.version:
            return
        if version != self.version + 1 or version > self.planned:
            raise Illegal
        self.version = version

    def plan(self, iteration: int, all_expired: bool) -> list[int] | None:
        if iteration in self.plans:
            return self.plans[iteration]
        if iteration != self.planned + 1:
            raise Illegal
        ready = sorted(self.those("appended"), key=lambda index: (self.groups[index].version, index))
        chosen, rest = ready[: self.size], ready[self.size :]
        stragglers = self._stragglers(iteration, len(chosen), rest)
        if stragglers is not None:
            for index in stragglers if all_expired else []:
                if index not in self.paused:
                    self._next_attempt(index)
            return None
        for index in chosen:
            self.groups[index].state, self.groups[index].iteration = "planned", iteration
        self.plans[iteration] = chosen
        return chosen

    def _stragglers(self, iteration: int, chosen: int, rest: list[int]) -> list[int] | None:
        """The groups in flight that the plan must wait for, or None when it need not wait.

        A group of version v must be trained by iteration v + 1 + staleness. Whatever the plan leaves must still fit: at most
        size x (d - iteration) groups that must be trained by iteration d.
        """
        flying = self.those("admitted")
        if chosen < self.size:
            return flying
        for deadline in range(self.version + 1 + self.staleness, iteration - 1, -1):
            urgent = [index for index in flying + rest if self.groups[index].version + 1 + self.staleness <= deadline]
            if len(urgent) > self.size * (deadline - iteration):
                return [index for index in flying if index in urgent]
        return None

    def release(self, iteration: int) -> int:
        if iteration > self.version:
            raise Illegal
        self.released = max(self.released, iteration)
        for group in self.groups[self.low_water :]:
            final = group.state in ("dropped", "failed") or (group.state == "planned" and group.iteration <= self.released)
            if not final:
                break
            self.low_water += 1
        return self.low_water


def streak(groups: list[tuple[int, int]]) -> int:
    """Number of samples in the newest groups in which all were solved; negative: in which none was."""
    for sign, all_alike in ((1, lambda n, k: k == n), (-1, lambda n, k: k == 0)):
        count = 0
        for samples, solved in reversed(groups):
            if not all_alike(samples, solved):
                break
            count += samples
        if count:
            return sign * count
    return 0
