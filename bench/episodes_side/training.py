"""Training with a tool in Polyreme and in TRL: the calculator example from the same warm policy, with the same batch and learning rate."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peer
from peer_side.tasks import CALCULATOR, tool_task

STEPS, WARM_UP, TURNS, LR = 10, 2, 3, 1e-4
TOTAL_TOKENS = 40
"""Of an episode, in TRL, which has no bound for a turn."""


def episodes_vs_trl(work: Path, rounds: int) -> dict[str, float]:
    """The ratios of the episodes per second. Prints those of each turn, with the mean rewards of its steps."""
    work.mkdir(parents=True, exist_ok=True)
    python, task = peer.trl_python(work), tool_task(work)
    tool = ("--tool", f"{CALCULATOR / 'calculator.py'}:Calculator.calculate", "--turns", TURNS)
    ratios, floors = [], []
    for number in range(rounds):
        theirs = peer.trl(python, task, STEPS, LR, ("--max-new-tokens", TOTAL_TOKENS, *tool))
        ours = peer.polyreme(work, f"tool-{time.time_ns()}", task, STEPS, LR, 0)
        rates = [_rate(side["step_seconds"]) for side in (ours, theirs)]
        rewards = [_rewards(side["mean_rewards"]) for side in (ours, theirs)]
        print(f"round {number + 1}: {rates[0]:7.1f} episodes/s (rewards {rewards[0]}), TRL {rates[1]:7.1f} episodes/s (rewards {rewards[1]})", flush=True)  # fmt: skip
        tokens, turns = (statistics.mean(ours[f"mean_{name}"]) for name in ("lengths", "turns"))
        alone = peer.parts(task, 8, tokens=round(tokens), requests=round(turns))
        each = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in alone.seconds.items())
        print(f"the parts of an iteration of episodes of {alone.length:.1f} tokens in {turns:.1f} turns: {each}", flush=True)
        ratios.append(rates[0] / rates[1])
        floors.append(peer.SAMPLES / alone.total / rates[1])
    return {"episodes_vs_trl": statistics.median(ratios), "episodes_floor_vs_trl": statistics.median(floors)}


def _rate(seconds: Sequence[float]) -> float:
    return peer.SAMPLES * len(seconds[WARM_UP:]) / sum(seconds[WARM_UP:])


def _rewards(means: Sequence[Any]) -> str:
    return f"{means[0]:.2f} to {means[-1]:.2f}"
