"""The trainer's machine, node 0: it announces a launch, names its members and reports how it ended.

Invariant: a launch has one member for every other node, and its outcome is one exit status or one error. An exit code that
forbids a restart takes precedence, whichever machine reports it.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from pathlib import Path

from polyreme import API_VERSION
from polyreme.config.run import RunConfig
from polyreme.errors import ConfigError, PolyremeError, StaleTermError, UnavailableError
from polyreme.experience.leases import Lease
from polyreme.experience.metric_records import ServiceNotice
from polyreme.experience.run import Run, RunState
from polyreme.experience.store_errors import address
from polyreme.net.endpoint import is_loopback
from polyreme.process.lifecycle import Child
from polyreme.process.supervisor import FINAL_CODES, describe_end
from polyreme.process.tasks import end_all
from polyreme_trainer.launch.rendezvous import (
    AGENT,
    TIMES,
    LaunchTimes,
    MachineError,
    Machines,
    check_launch,
    proof_of,
    start_agent,
)
from polyreme_trainer.launch.supervision import LEARNER

logger = logging.getLogger(__name__)


async def lead(
    run: Run,
    config: RunConfig,
    redis_url: str,
    endpoint: str,
    log_dir: Path,
    ranks: Sequence[str] = LEARNER,
    agent: Sequence[str] = AGENT,
    times: LaunchTimes = TIMES,
) -> int:
    """Leads one launch to its end.

    Args:
        endpoint: host:port of the rendezvous on this machine, at which the other machines reach it.
        ranks: Python's arguments for a rank.

    Returns:
        The exit status of this machine's agent; 0 also when the run was asked to stop before all machines had answered.

    Raises:
        UnavailableError: a machine did not answer. MachineError: a machine was lost, or its ranks failed.
        StaleTermError: another process now leads. ConfigError: the others cannot reach `endpoint`. PolyremeError: the agent was
        killed.
    """
    machines = Machines(run, times)
    launch = f"learner-0-{uuid.uuid4().hex[:8]}"
    facts: dict[str, object] = {"node": 0, "log_dir": str(log_dir), "members": []}
    proof = proof_of(config, launch)
    for old in proof.parent.glob(proof_of(config, "*").name):  # left behind by killed leaders
        old.unlink(missing_ok=True)
    proof.touch()
    try:
        async with await machines.register(Lease("learner", launch, endpoint, "", API_VERSION, facts)) as keeper:
            members = await _gather(machines, run, config, keeper.lease, times.notice)
            if not members:
                return 0
            await keeper.update({"members": [lease.id for lease in members]})
            child = start_agent(keeper.lease, 0, run, config, redis_url, ranks, agent, log_path=None)
            try:
                status = await _outcome(machines, run, keeper.lease, members, child, times.report)
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


async def _gather(machines: Machines, run: Run, config: RunConfig, call: Lease, notice_seconds: float) -> list[Lease]:
    """The lease of one machine for every other node, once all have answered; empty when the run was asked to stop."""
    nodes, seconds = range(1, config.trainer.parallel.nodes), config.rollout.start_timeout
    answers: dict[int, Lease] = {}

    async def look() -> list[Lease] | None:
        nonlocal answers
        if await run.check() in (RunState.DRAINING, RunState.DONE):
            return []
        answers = await machines.answers(call.id)
        for lease in answers.values():
            check_launch(lease, call)
        return [answers[node] for node in nodes] if all(node in answers for node in nodes) else None

    def missing() -> tuple[str, str]:
        absent = [node for node in nodes if node not in answers]
        at = "URL" if is_loopback(address(run.redis)) else f"redis://{address(run.redis)}"
        return (
            f"machine{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}",
            "; ".join(f"polyreme learner --node {node} --redis {at}" for node in absent),
        )

    members = await run.until(look, within=notice_seconds)
    if members is None:
        who, commands = missing()
        text = f"the learner waits for {who}, at most {seconds:g} s; start there: {commands}"
        logger.warning("%s", text)
        await run.emit(ServiceNotice(service="train", text=text))
        members = await run.until(look, within=seconds)
    if members is None:
        who, commands = missing()
        raise UnavailableError(
            f"{who} of the learner within {seconds:g} s", "no answer", f"Start `{commands}` there, then continue with --resume."
        )
    if is_loopback(call.address) and (far := [lease for lease in members if not is_loopback(lease.address)]):
        raise ConfigError(
            f"an address of the trainer that the learner's machine {far[0].facts['node']} ({far[0].address}) can reach",
            f"{call.address}, its address towards Redis",
            "Pass Redis' address in that network (--redis), or the trainer's own (`polyreme train --advertise HOST`).",
        )
    return members


async def _outcome(
    machines: Machines, run: Run, call: Lease, members: Sequence[Lease], child: Child, report_seconds: float
) -> int:
    """Waits for the end of the launch. Returns the exit status of this machine's agent, or raises another machine's error.

    If both have ended, an exit code that forbids a restart decides.
    """

    async def look() -> PolyremeError | None:
        there = await machines.there()
        for member in members:
            lease = there.get(member.id)
            here = lease is not None and lease.facts["launch"] == call.id
            if machines.is_lost(member.id, here):
                if lease is None:
                    return MachineError(member, "an expired lease", "Check that it runs and reaches Redis.")
                found = f"machine {lease.facts['node']} in launch {lease.facts['launch']} of another process"
                return StaleTermError("this process to lead the learner", found, "Let the other process continue, or stop it.")
            if lease is not None:
                try:
                    check_launch(lease, call)
                except MachineError as error:
                    return error
        return None

    decided = {0, *FINAL_CODES}
    here, others = asyncio.create_task(child.wait()), asyncio.create_task(run.until(look))
    try:
        await asyncio.wait({here, others}, return_when=asyncio.FIRST_COMPLETED)
        here_first = here.done()
        if not (here_first and here.result() in decided):
            await asyncio.wait({here, others}, timeout=report_seconds)
        error = others.result() if others.done() else None
        if here.done() and here.result() in decided:
            return here.result()
        if error is not None and not (here_first and error.exit_code not in FINAL_CODES):
            raise error
        return here.result()
    finally:
        await end_all((here, others))
