"""Faults, reproducible from a seed: a phase of the run to wait for, a moment in it, a process, and an action on it.

Phases are recognised by the commands that the trainer's processes send to Redis.
"""

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polyreme.experience.scripts import _text


def script_digest(script: str) -> bytes:
    return hashlib.sha1(_text(script).encode()).hexdigest().encode()


@dataclass(frozen=True)
class Phase:
    """A moment of the run: a process sends a matching command, plus up to `spread` seconds."""

    sender: str
    pattern: re.Pattern[bytes]
    moments: tuple[str, ...] = ("before", "lost", "after")
    spread: tuple[float, float] = (0.0, 0.003)


def _script(sender: str, script: str, *moments: str, spread: tuple[float, float] = (0.0, 0.003)) -> Phase:
    return Phase(sender, re.compile(re.escape(script_digest(script))), moments or Phase.moments, spread)


PHASES = {
    "admit": _script("orchestrator", "admit"),
    "generate": _script("orchestrator", "admit", "after", spread=(0.0, 0.02)),
    "chunk": _script("orchestrator", "admit", "after", spread=(0.02, 0.12)),
    "draft": _script("orchestrator", "draft"),
    "score": Phase("reward", re.compile(b"score"), ("after",), (0.0, 0.01)),
    "append": _script("orchestrator", "append"),
    "plan": _script("learner", "plan"),
    "train": Phase("learner", re.compile(rb"HMGET.*:payloads", re.S), ("after",), (0.0, 0.04)),
    "write arena": _script("learner", "version", "before"),
    "stage": _script("learner", "version", "after", spread=(0.0, 0.003)),
    "swap": _script("learner", "version", "after", spread=(0.002, 0.012)),
    "ack": _script("learner", "commit"),
    "checkpoint": Phase("learner", re.compile(rb'"kind": "iteration"'), ("after",), (0.0, 0.004)),
    "release": _script("learner", "release"),
}
IN_EPISODES = ("admit", "generate", "chunk", "draft", "score", "append")
"""Phases while episodes are played; `score`: a turn."""
ACTIONS: Mapping[str, Mapping[str, float]] = {
    "redis": {"kill": 2, "stop": 1},
    "orchestrator": {"kill": 5, "stop": 1, "cut": 1, "usurp": 1},
    "learner": {"kill": 5, "stop": 1, "cut": 1, "usurp": 1},
    "rollout": {"kill": 4, "stop": 2, "cut": 2, "term": 2},
    "reward": {"kill": 2, "stop": 1, "cut": 1, "term": 2},
    "environment": {"kill": 3, "stop": 1, "cut": 2, "term": 2},
    "worker": {"kill": 1},
    "address": {"cut": 1},
    "supervisor": {"kill": 1},
}
"""Actions by victim, with their weights. `term` drains a server, which is then replaced."""
BEYOND_ITS_LEASE = {"rollout": 0.1, "reward": 0.25}
"""Fraction of a victim's stops that outlast its lease."""
WEIGHTS = {
    "redis": 3,
    "orchestrator": 6,
    "learner": 6,
    "rollout": 6,
    "reward": 3,
    "environment": 4,
    "worker": 3,
    "address": 3,
    "supervisor": 2,
}


@dataclass(frozen=True)
class Fault:
    """A fault. `seconds`: downtime of the process. `gap`: seconds until the wait for the next fault starts."""

    phase: str
    moment: str
    delay: float
    victim: str
    action: str
    seconds: float
    gap: float

    def __str__(self) -> str:
        at = f"{self.moment} {self.phase}" + (f" + {self.delay * 1e3:.0f} ms" if self.moment == "after" else "")
        return f"{at}: {self.action} {self.victim} for {self.seconds:.2f} s, next after {self.gap:.2f} s"


def schedule(seed: int, count: int, replicas: int, victims: Sequence[str], pace: float, drafts: bool = False) -> list[Fault]:
    """The faults of a seed: phases equally often, every victim at least once if there are enough faults.

    Args:
        pace: mean seconds between two faults.
        drafts: whether groups take long enough for partial rollouts.
    """
    rng = random.Random(seed)
    phases = [phase for phase in PHASES if drafts or phase != "draft"]
    faults = []
    for phase, victim in zip(_evenly(rng, phases, count), _victims(rng, victims, count), strict=True):
        actions = ACTIONS[victim]
        action = rng.choices(list(actions), list(actions.values()))[0]
        seconds = (
            rng.uniform(0.0, 0.3) if action in ("kill", "term") else rng.choice([rng.uniform(0.1, 0.6), rng.uniform(0.5, 2.0)])
        )
        if action == "stop" and rng.random() < BEYOND_ITS_LEASE.get(victim, 0.0):
            seconds = 12.0
        faults.append(_fault(rng, phase, victim, action, seconds, replicas, pace))
    return faults


def kills(seed: int, count: int, replicas: int, victims: Sequence[str], phases: Sequence[str], pace: float) -> list[Fault]:
    """Kills of all victims equally often, and in all phases. Arguments as of `schedule`."""
    rng = random.Random(seed)
    drawn = zip(_evenly(rng, victims, count), _evenly(rng, phases, count), strict=True)
    return [_fault(rng, phase, victim, "kill", rng.uniform(0.0, 0.3), replicas, pace) for victim, phase in drawn]


def _fault(rng: random.Random, phase: str, victim: str, action: str, seconds: float, replicas: int, pace: float) -> Fault:
    if victim == "rollout":
        victim = f"rollout-{rng.randrange(replicas)}"
    kind = PHASES[phase]
    moment, delay = rng.choice(kind.moments), rng.uniform(*kind.spread)
    return Fault(phase, moment, delay, victim, action, seconds, rng.expovariate(1 / pace))


def _evenly(rng: random.Random, phases: Sequence[str], count: int) -> list[str]:
    deck = [*phases] * (count // len(phases)) + rng.sample(phases, count % len(phases))
    rng.shuffle(deck)
    return deck


def _victims(rng: random.Random, victims: Sequence[str], count: int) -> list[str]:
    more = rng.choices(victims, [WEIGHTS[name] for name in victims], k=max(0, count - len(victims)))
    deck = [*rng.sample(victims, min(count, len(victims))), *more]
    rng.shuffle(deck)
    return deck
