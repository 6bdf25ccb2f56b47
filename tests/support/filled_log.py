"""Fills the log for a learner without an orchestrator: all admissible groups appear immediately, with contents that depend on their
index."""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import replace

from polyreme.experience.ledger import ExperienceLog, Writer
from polyreme.experience.pass_rates import Tally
from polyreme.experience.record_codec import encode_group
from polyreme.experience.run import Run
from support.episodes import branched, episode_group
from support.learning import made_up_groups

VOCAB = 45


async def fill(
    run: Run,
    groups: int,
    samples: int,
    lags: list[int] | None = None,
    allowed: Callable[[], int] = lambda: sys.maxsize,
    episodes: bool = False,
) -> None:
    """Acts as the orchestrator until it is cancelled.

    Args:
        groups, samples: groups per iteration, and samples per group.
        lags: collects every group's lag behind its iteration.
        allowed: returns the current maximum number of groups.
        episodes: whether samples are episodes of several turns with rewards, some of them in two trajectories.
    """
    log, there = ExperienceLog(run), 0
    await log.take(Writer.ORCHESTRATOR)
    while True:
        for admission in await log.admit(min(groups, allowed() - there)) if allowed() > there else ():
            iteration, place = divmod(admission.index, groups)
            if episodes:
                group = branched(episode_group(iteration + 1, place, samples))
            else:
                group = made_up_groups(iteration + 1, VOCAB, groups, samples)[place]
            made = [
                replace(sample, spans=[(admission.version, start, end) for _, start, end in sample.spans])
                for sample in group.samples
            ]
            group = replace(group, index=admission.index, attempt=admission.attempt, samples=made)
            if lags is not None:
                lags.append(iteration - admission.version)
            scores = {sample.episode if episodes else number: sample.score for number, sample in enumerate(made)}
            tally = Tally(f"prompt-{place}", samples, sum(score > 0.5 for score in scores.values()))
            await log.append(admission.index, admission.attempt, encode_group(group), admission.version, 0.0, tally)
            there += 1
        await asyncio.sleep(0.005)
