"""A learner on several machines: who is there, and the launches that all of them share.

Kept here: a launch has every machine, or it ends. The trainer's machine, node 0, calls it by a lease; the others answer in theirs, each
once it sees the trainer's files; those that are then named start their share of the ranks, under torchrun's agent. When a machine is
gone, or its ranks are, the launch ends; and when the launch ends, every machine ends its ranks: nobody waits in a collective for the
dead. One process leads one launch; restarts, and their limit, are the trainer's supervisor's.
"""

import asyncio
import logging
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme import API_VERSION, logs
from polyreme.config import RunConfig
from polyreme.errors import ConfigError, PolyremeError, StaleTermError, UnavailableError
from polyreme.lifecycle import Child, exit_on_error
from polyreme.log.run import Run, RunState
from polyreme.log.store import RIDE_OVER, address, connect
from polyreme.ports import free_port
from polyreme.redis_url import redis_option
from polyreme.registry import Lease, Registry, address_towards
from polyreme.rundir import read_model_files
from polyreme.supervision import FINAL_CODES, describe_end, last_error
from polyreme_trainer.supervisor import LEARNER, rank_environment

_log = logging.getLogger(__name__)

AGENT = ("-m", "polyreme_trainer.learner.agent")
"""What Python runs as a machine's agent. Arguments: where to meet, the launch, node, nodes, ranks per node, what to run as a rank."""
_ATTACH_SECONDS = 10.0
_NOTICE_SECONDS = 2.0
_REPORT_SECONDS = 5.0
"""For other machines to say how their ranks ended, once these have; and for these to end, once others have."""
_BACK_SECONDS = 6.0
"""For a lease to come back that expired while Redis stood still, or that a late write has put back: more than a renewal's interval."""
_FILES_SECONDS = 10.0
"""For a file of the trainer's to be seen on the other machines."""


class MachineError(PolyremeError):
    """Another machine's part of a launch has ended. `exit_code` is its ranks' where a restart would meet that again."""

    def __init__(self, lease: Lease, found: str, do: str, status: int = 1) -> None:
        super().__init__(f"the learner's machine {lease.facts['node']} ({lease.address}) to go on", found, do)
        self.exit_code = status if status in FINAL_CODES else 1


class Machines:
    """The leases of a run's learner machines, by id, and how long each has been missed."""

    def __init__(self, run: Run) -> None:
        self._run, self._registry = run, Registry(run)
        self._missed: dict[str, float] = {}

    async def there(self) -> dict[str, Lease]:
        return {lease.id: lease for lease in await self._registry.leases("learner")}

    async def call(self) -> Lease | None:
        """The newest launch."""
        calls = [lease for lease in (await self.there()).values() if lease.facts["node"] == 0]
        return max(calls, key=lambda lease: lease.facts["at"], default=None)

    async def answers(self, launch: str) -> dict[int, Lease]:
        """Who has answered a launch, by node: the newest of each."""
        found = sorted((await self.there()).values(), key=lambda lease: lease.facts["at"])
        return {lease.facts["node"]: lease for lease in found if lease.facts.get("launch") == launch}

    def gone(self, lease: str, there: bool) -> bool:
        """Whether a lease has been missed, at every look, for so long that it will not come back by itself."""
        now = time.monotonic()
        if there:
            self._missed.pop(lease, None)
            return False
        return now - self._missed.setdefault(lease, now) > _BACK_SECONDS


# -- the trainer's machine


async def lead(
    run: Run,
    config: RunConfig,
    redis_url: str,
    place: str,
    log_dir: Path,
    ranks: Sequence[str] = LEARNER,
    agent: Sequence[str] = AGENT,
) -> int:
    """Leads one launch to its end.

    Args:
        place: host:port where the ranks meet: this machine, as the others reach it.
        ranks: what Python runs as a rank.

    Returns:
        The exit status of this machine's agent; 0 as well when the run was asked to stop before all machines were there.

    Raises:
        UnavailableError: a machine did not come. MachineError: one has gone, or cannot go on.
        StaleTermError: another process leads now. ConfigError: the others cannot reach `place`. PolyremeError: the agent was killed.
    """
    machines = Machines(run)
    launch = f"learner-0-{uuid.uuid4().hex[:8]}"
    facts: dict[str, Any] = {"node": 0, "at": time.time(), "log_dir": str(log_dir), "members": []}
    proof = _proof(config, launch)
    for old in proof.parent.glob(_proof(config, "*").name):  # of leaders that were killed
        old.unlink(missing_ok=True)
    proof.touch()
    try:
        async with await Registry(run).register(Lease("learner", launch, place, "", API_VERSION, facts)) as keeper:
            members = await _gather(machines, run, config, keeper.lease)
            if not members:
                return 0
            await keeper.update({"members": [lease.id for lease in members]})
            child = _start_agent(keeper.lease, 0, run, config, redis_url, ranks, agent, log_path=None)
            try:
                status = await _outcome(machines, run, keeper.lease, members, child)
                if status < 0:
                    raise PolyremeError(
                        "this machine's agent to keep running", describe_end(child), f"See the logs in {log_dir}."
                    )
                return status
            finally:
                child.kill()
                await child.reap()
    finally:
        proof.unlink(missing_ok=True)


async def _gather(machines: Machines, run: Run, config: RunConfig, call: Lease) -> list[Lease]:
    """One machine for every other node, once all have answered; none when the run was asked to stop."""
    nodes, seconds = range(1, config.trainer.parallel.nodes), config.rollout.start_timeout
    answers: dict[int, Lease] = {}

    async def look() -> list[Lease] | None:
        nonlocal answers
        if await run.check() in (RunState.DRAINING, RunState.DONE):
            return []
        answers = await machines.answers(call.id)
        for lease in answers.values():
            _judge(lease, call)
        return [answers[node] for node in nodes] if all(node in answers for node in nodes) else None

    def missing() -> tuple[str, str]:
        absent = [node for node in nodes if node not in answers]
        at = "URL" if address(run.redis).startswith("127.") else f"redis://{address(run.redis)}"
        return (
            f"machine{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}",
            "; ".join(f"polyreme learner --node {node} --redis {at}" for node in absent),
        )

    members = await run.until(look, within=_NOTICE_SECONDS)
    if members is None:
        who, commands = missing()
        text = f"the learner waits for {who}, {seconds:g} s at most; there: {commands}"
        _log.warning("%s", text)
        await run.emit({"kind": "notice", "service": "train", "text": text})
        members = await run.until(look, within=seconds)
    if members is None:
        who, commands = missing()
        raise UnavailableError(
            f"{who} of the learner within {seconds:g} s", "no answer", f"Start `{commands}` there, then go on with --resume."
        )
    if call.address.startswith("127.") and (far := [lease for lease in members if not lease.address.startswith("127.")]):
        raise ConfigError(
            f"an address of the trainer that the learner's machine {far[0].facts['node']} ({far[0].address}) can reach",
            f"{call.address}, its own on the way to Redis",
            "Give the trainer Redis' address in that network (--redis), or its own (`polyreme train --advertise HOST`).",
        )
    return members


async def _outcome(machines: Machines, run: Run, call: Lease, members: Sequence[Lease], child: Child) -> int:
    """How the launch ends: by this machine's agent, or by another machine. Whoever says that a restart is of no use is believed."""

    async def look() -> PolyremeError | None:
        there = await machines.there()
        for member in members:
            lease = there.get(member.id)
            here = lease is not None and lease.facts["launch"] == call.id
            if machines.gone(member.id, here):
                if lease is None:
                    return MachineError(member, "its lease is gone", "See whether it runs, and reaches Redis.")
                found = f"machine {lease.facts['node']} in launch {lease.facts['launch']} of another"
                return StaleTermError("this process to lead the learner", found, "Let that one go on, or stop it.")
            if lease is not None:
                try:
                    _judge(lease, call)
                except MachineError as error:
                    return error
        return None

    decided = {0, *FINAL_CODES}
    here, others = asyncio.create_task(child.wait()), asyncio.create_task(run.until(look))
    try:
        await asyncio.wait({here, others}, return_when=asyncio.FIRST_COMPLETED)
        here_first = here.done()
        if not (here_first and here.result() in decided):
            await asyncio.wait({here, others}, timeout=_REPORT_SECONDS)
        error = others.result() if others.done() else None
        if here.done() and here.result() in decided:
            return here.result()
        if error is not None and not (here_first and error.exit_code not in FINAL_CODES):
            raise error
        return here.result()
    finally:
        for task in (here, others):
            task.cancel()
        await asyncio.gather(here, others, return_exceptions=True)


def _judge(lease: Lease, call: Lease) -> None:
    """Raises MachineError when a machine's part of the launch has ended badly."""
    if lease.facts["launch"] == call.id and lease.facts["status"]:
        log = _log_path(call, lease.facts["node"])
        raise MachineError(lease, lease.facts["why"], f"See {log}.", lease.facts["status"])


# -- the others


async def follow(
    run: Run,
    config: RunConfig,
    redis_url: str,
    node: int,
    stop: asyncio.Event,
    ranks: Sequence[str] = LEARNER,
    agent: Sequence[str] = AGENT,
) -> None:
    """Runs machine `node`'s share of the ranks, launch after launch, until `stop` or until the run is done.

    Raises:
        ConfigError: the run has no such machine. RunFailedError: it failed.
    """
    if not 0 < node < (nodes := config.trainer.parallel.nodes):
        raise ConfigError(
            f"--node from 1 to {nodes - 1}" if nodes > 1 else "trainer.parallel.nodes above 1",
            str(node if nodes > 1 else nodes),
            "Node 0 is the trainer's machine.",
        )
    name = f"learner-{node}-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    facts = {"node": node, "at": time.time(), "launch": "", "status": None, "why": ""}
    lease = Lease("learner", name, address_towards(redis_url), "", API_VERSION, facts)
    async with await Registry(run).register(lease) as keeper:
        machines, known = Machines(run), ""

        async def over() -> bool:
            return stop.is_set() or await run.check() is RunState.DONE

        async def called() -> tuple[Lease | None] | None:
            if await over():
                return (None,)
            call = await machines.call()
            return (call,) if call is not None and call.id != known else None

        async def left() -> bool | None:
            """Whether this is the launch no more."""
            call = await machines.call()
            ours = call is not None and call.id == known
            gone = machines.gone(known, ours)
            return True if gone or (call is not None and not ours) or await over() else None

        async def named() -> bool | None:
            call = await machines.call()
            if call is not None and call.id == known and name in call.facts["members"]:
                return True
            return False if await left() else None

        async def run_share(call: Lease) -> None:
            parallel = config.trainer.parallel
            first, log_path = node * parallel.ranks_per_node, _log_path(call, node)
            last = first + parallel.ranks_per_node - 1
            _log.info("launch %s: ranks %d to %d of %d, log in %s", known, first, last, parallel.world_size, log_path)
            child = _start_agent(call, node, run, config, redis_url, ranks, agent, log_path)
            here, leaving = asyncio.create_task(child.wait()), asyncio.create_task(run.until(left))
            try:
                await asyncio.wait({here, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if here.done():
                    why = "" if here.result() == 0 else last_error(child.log_tail(60)) or describe_end(child)
                    _log.info("launch %s: %s %s", known, describe_end(child), why)
                    await keeper.update({"status": here.result(), "why": why})
                await leaving
            finally:
                for task in (here, leaving):
                    task.cancel()
                await asyncio.gather(here, leaving, return_exceptions=True)
                child.kill()
                await child.reap()

        while (found := await run.until(called)) and (call := found[0]):
            known = call.id
            try:
                await _check_files(run, config, known)
            except ConfigError as error:
                _log.error("%s", error)
                await keeper.update({"launch": known, "status": error.exit_code, "why": str(error)})
                await run.until(left)
                continue
            await keeper.update({"launch": known, "status": None, "why": ""})
            if await run.until(named):
                await run_share(call)


async def _check_files(run: Run, config: RunConfig, launch: str) -> None:
    """Raises ConfigError unless the run directory and the model are here what they are on the trainer's machine."""
    deadline, proof = time.monotonic() + _FILES_SECONDS, _proof(config, launch)
    while not proof.exists():
        if time.monotonic() > deadline:
            raise ConfigError(
                f"the trainer's run directory at {config.run_dir} of {socket.gethostname()}",
                f"no {proof.name} in it",
                "Mount one file system for all machines of the learner, at the same path (output_dir).",
            )
        await asyncio.sleep(0.5)
    if await asyncio.to_thread(read_model_files, config.model.path) != await run.model_files():
        raise ConfigError(
            f"the run's model at model.path = {config.model.path} of {socket.gethostname()}",
            "another one",
            "Mount the same directory on all machines of the learner, at the same path.",
        )


def _proof(config: RunConfig, launch: str) -> Path:
    """A file that the trainer's machine makes for each launch: who sees it has the run directory. Its name is new, so no cache knows it."""
    return config.run_dir / f".launch-{launch}"


def _log_path(call: Lease, node: int) -> Path:
    return Path(call.facts["log_dir"]) / f"learner-node-{node}.log"


def _start_agent(
    call: Lease,
    node: int,
    run: Run,
    config: RunConfig,
    redis_url: str,
    ranks: Sequence[str],
    agent: Sequence[str],
    log_path: Path | None,
) -> Child:
    """Starts a machine's agent, and with it the machine's ranks. Without a log path it writes where this process does."""
    parallel = config.trainer.parallel
    place = (call.address, call.id, str(node), str(parallel.nodes), str(parallel.ranks_per_node))
    if log_path is not None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
    environment = rank_environment(config, run.run_id, redis_url)
    return Child.spawn(f"learner's machine {node}", (sys.executable, *agent, *place, *ranks), environment, log_path)


def machines(
    ranks: Annotated[list[str], typer.Argument(help="What Python runs as a learner rank.")],
    redis: Annotated[str, redis_option("URL of the run's Redis.")],
    run: Annotated[str, typer.Option(envvar="POLYREME_RUN", help="Run id.")],
    log_dir: Annotated[Path, typer.Option(help="For the other machines' logs.")],
    host: Annotated[str | None, typer.Option(help="Where the other machines reach this one.")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where the ranks meet; 0: a free one.")] = 0,
) -> None:
    """Leads one launch of a learner on several machines."""
    logs.setup("learner")

    async def once() -> int:
        client = await connect(redis, RIDE_OVER)
        try:
            found = await Run.attach(client, run, _ATTACH_SECONDS)
            place = f"{host or address_towards(redis)}:{port or free_port('0.0.0.0')}"
            return await lead(found, await found.config(), redis, place, log_dir, ranks)
        finally:
            with suppress(OSError):
                await client.aclose()

    with exit_on_error("learner"):
        sys.exit(asyncio.run(once()))


if __name__ == "__main__":
    typer.run(machines)
