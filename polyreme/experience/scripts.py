"""Runs the Lua scripts of a run.

Invariant: each script is atomic, so a crash of any process happens between two of them. Every script gets the run's common keys
(named in common.lua) and, but for `count`, is idempotent, so a command whose answer was lost can be repeated.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.commands.core import AsyncScript
from redis.exceptions import NoScriptError

from polyreme.errors import ConfigError, PolyremeError, StaleTermError, UnavailableError
from polyreme.experience.store_errors import RefusedError

KEYS = ("meta", "terms", "ledger", "in_flight", "appended", "plans", "payloads", "drafts", "events")


_RELOADS = 10


class StaleAttemptError(PolyremeError, RuntimeError):
    """The group has another current attempt, or another state. Discard the work on this attempt."""


class StaleGrantError(PolyremeError, RuntimeError):
    """The device grant has ended. Its holder must stop using the devices."""


class TransitionError(PolyremeError, RuntimeError):
    """A transition that the table does not allow: a bug in the caller."""


def key(run_id: str, name: str) -> str:
    """A Redis key of a run. The braces put all keys of a run into one slot of a Redis cluster."""
    return f"polyreme:{{{run_id}}}:{name}"


class Scripts:
    """The scripts, bound to one run and one client."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._redis, self._run_id = redis, run_id
        self._common = [key(run_id, name) for name in KEYS]
        self._registered: dict[str, AsyncScript] = {}

    async def call(self, name: str, *args: bytes | str | int, keys: Sequence[str] = ()) -> Any:
        """Runs `name`.lua with the common keys, the further `keys` (full names) and `args`.

        Raises:
            StaleTermError, StaleAttemptError, TransitionError: the script refused; nothing has changed.
            StoreError: Redis cannot be reached, or refuses.
        """
        script = self._registered.get(name)
        if script is None:
            script = self._registered[name] = self._redis.register_script(_text(name))
        try:
            for _ in range(_RELOADS):
                with suppress(NoScriptError):  # the call loads the script; a restarted Redis has lost it
                    return await script(keys=[*self._common, *keys], args=list(args))
            return await script(keys=[*self._common, *keys], args=list(args))
        except RefusedError as error:
            raise self._explain(name, error) from error.__cause__
        except NoScriptError as error:
            raise RefusedError(error) from error

    def _explain(self, name: str, error: RefusedError) -> PolyremeError:
        """Translates a script's own error. Other errors of Redis stay as they are."""
        code, detail = error.code, error.detail
        if code == "STALETERM":
            return StaleTermError(
                f"the current term of the writer for `{name}`",
                detail,
                "Let the process that has taken over continue; this one must exit.",
            )
        if code == "STALEATTEMPT":
            return StaleAttemptError(f"`{name}` for the current attempt", f"`{detail}`", "Discard the work on the old attempt.")
        if code == "STALEGRANT":
            return StaleGrantError(
                "a grant of the devices that has not ended", detail, "Stop using the devices, then claim them again."
            )
        if code == "ORDER":
            return TransitionError(
                f"a legal transition for `{name}`", detail, "See the transition table in docs/reference/log.md."
            )
        if code == "RUNEXISTS":
            return ConfigError(
                "a new run id", f"run {self._run_id} in this Redis", "Resume it with --resume, or start a new one with --fork."
            )
        if code == "NORUN":
            return UnavailableError(
                f"run {self._run_id} in this Redis", "no record of it", "Check the run id and the Redis URL, or start the run."
            )
        return error


@cache
def _text(name: str) -> str:
    """A script, with common.lua inserted after its first line, which must stay first."""
    folder = files("polyreme.experience") / "lua"
    flags, _, body = (folder / f"{name}.lua").read_text().partition("\n")
    return f"{flags}\n{(folder / 'common.lua').read_text()}\n{body}"
