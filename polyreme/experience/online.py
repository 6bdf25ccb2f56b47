"""Sessions of a running product, which become groups of the log when they have their rewards.

    (none) -> open -> rewarded -> trained (in a group of the log)        open, rewarded -> dropped(reason)

Invariant: what a script has answered survives every process. A session is in at most one group: the script that appends the group
also ends its sessions. Only the orchestrator ends sessions. What an ended session keeps is its state, for a while, or nothing.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from polyreme.experience.ledger import ExperienceLog
from polyreme.experience.run import Run

REASONS = ("stale", "no_reward", "no_group", "invalid")
"""Why sessions are dropped: too old a policy; no reward or group of its task within max_age; turns that this run cannot read."""


def session_key(secret: str, id: str) -> str:
    """The key of a session: derived, so that every server that has the secret knows it."""
    return f"{id}.{hmac.digest(secret.encode(), f'session {id}'.encode(), hashlib.sha256).hex()}"


def session_url(server: str, id: str) -> str:
    """The address of a session on a server `http://host:port`, from which agents reach the policy."""
    return f"{server}/s/{id}/v1"


@dataclass(frozen=True)
class OnlineSession:
    """A session as it is kept.

    Attributes:
        state: open, rewarded, trained or dropped; unknown: there is none, or it ended long ago.
        turns: each as its environment server stored it.
        reward: of a rewarded or trained one.
        reason: one of REASONS, of a dropped one.
        group: the index of a trained one's group.
    """

    id: str
    state: str = "unknown"
    task: str = ""
    turns: tuple[bytes, ...] = ()
    reward: float | None = None
    reason: str = ""
    group: int | None = None


class OnlineSessions:
    """The sessions of one run. `max_age`: seconds for which an ended one's state is kept, at least an hour; 0: not at all."""

    def __init__(self, run: Run, max_age: float = 86_400.0) -> None:
        self._run, self._keep = run, max(3600, int(max_age)) if max_age else 0
        self._open, self._rewarded, self._versions, self._counts = (
            run.key(f"online_{name}") for name in ("open", "rewarded", "versions", "counts")
        )

    async def open(self, id: str, task: str, most: int) -> bool:
        """Opens a session. Returns False when `most` are kept already."""
        keys = [self._open, self._rewarded, self._counts, self._session(id)]
        return bool(await self._run.scripts.call("online_open", id, task, most, keys=keys))

    async def add_turn(self, id: str, number: int, turn: bytes, oldest_version: int) -> str:
        """Stores turn `number`, from 0. Returns "ok", "conflict" if it has another one with this number, or the state of a
        session that is not open."""
        keys = [self._open, self._versions, self._session(id)]
        return str(await self._run.scripts.call("online_turn", id, number, turn, oldest_version, keys=keys), "ascii")

    async def reward(self, id: str, reward: float, task: str, *, grouped: bool) -> str:
        """Ends a session with its reward. Returns "ok", also for the same reward again, or why not: see online_reward.lua.

        Args:
            task: of a session that was opened without; "": that which it has.
            grouped: whether a task is required.
        """
        keys = [self._open, self._rewarded, self._counts, self._session(id)]
        words = (id, repr(float(reward)), task, int(grouped))
        return str(await self._run.scripts.call("online_reward", *words, keys=keys), "ascii")

    async def read(self, id: str) -> OnlineSession:
        """A session."""
        found = {name.decode(): value for name, value in (await self._run.redis.hgetall(self._session(id))).items()}
        if not found:
            return OnlineSession(id)
        turns = tuple(found[str(number)] for number in range(int(found.get("turns", 0))))
        reward = float(found["reward"]) if "reward" in found else None
        state, task, reason = (found.get(name, b"").decode() for name in ("state", "task", "reason"))
        group = int(found["group"]) if "group" in found else None
        return OnlineSession(id, state, task, turns, reward, reason, group)

    async def rewarded(self) -> list[str]:
        """The ids of the sessions that wait for their group, oldest reward first."""
        return [id.decode() for id in await self._run.redis.zrange(self._rewarded, 0, -1)]

    async def task(self, id: str) -> str | None:
        """The task of a session; None if there is no such one. It does not change once there is a reward."""
        task = await self._run.redis.hget(self._session(id), "task")
        return None if task is None else task.decode()

    async def too_old(self, oldest_version: int, max_age: float) -> list[tuple[str, str]]:
        """(id, reason) of the sessions with a token of a version below `oldest_version`, or older than `max_age` seconds."""
        redis = self._run.redis
        seconds, micros = await redis.time()
        before = f"({seconds * 1000 + micros // 1000 - int(max_age * 1000)}"
        found = {id: "no_reward" for id in await redis.zrangebyscore(self._open, "-inf", before)}
        found |= {id: "no_group" for id in await redis.zrangebyscore(self._rewarded, "-inf", before)}
        found |= {id: "stale" for id in await redis.zrangebyscore(self._versions, "-inf", f"({oldest_version}")}
        return [(id.decode(), reason) for id, reason in found.items()]

    async def drop(self, log: ExperienceLog, id: str, reason: str) -> bool:
        """Ends a session without training on it. Returns False when it has ended before."""
        keys = [self._open, self._rewarded, self._versions, self._counts, self._session(id)]
        return bool(await log.change("online_drop", id, reason, self._keep, keys=keys))

    async def append(
        self, log: ExperienceLog, index: int, ids: Sequence[str], payload: bytes, oldest_version: int, mean_reward: float
    ) -> bool | None:
        """Appends the group of some rewarded sessions, and ends them.

        Args:
            index: `LogReader.next_index`, which the payload has.
            payload, oldest_version, mean_reward: as of `ExperienceLog.append`.

        Returns:
            False when a session has ended or the index is another; None while the log has no room for a group of this version.
        """
        keys = [self._rewarded, self._versions, self._counts, *map(self._session, ids)]
        words: list[bytes | str | int] = [index, oldest_version, repr(float(mean_reward)), payload, self._keep, *ids]
        done = int(await log.change("online_append", *words, keys=keys))
        return None if done < 0 else bool(done)

    async def count(self, what: str) -> None:
        """Counts an event that changes no session: "refused" or "unrecorded"."""
        await self._run.redis.hincrby(self._counts, what, 1)

    async def counts(self) -> dict[str, int]:
        """Sessions by what they are or were: open, complete (they have a reward and wait for their group), and in total opened,
        rewarded, trained, refused, unrecorded and `dropped REASON`."""
        redis = self._run.redis
        total = {name.decode(): int(number) for name, number in (await redis.hgetall(self._counts)).items()}
        return {**total, "open": int(await redis.zcard(self._open)), "complete": int(await redis.zcard(self._rewarded))}

    def _session(self, id: str) -> str:
        return self._run.key(f"online_session:{id}")
