"""Alarms: pure functions over the observations of the last iterations.

Invariant: an alarm never stops a run. Its text says in one sentence what was observed, since which iteration, and what to check.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

CONSTANT_FOR = 5
SUSTAINED_FOR = 3
GROWTH = 10.0


@dataclass(frozen=True)
class Observation:
    """One iteration as the alarms see it."""

    iteration: int
    reward_min: float
    reward_max: float
    trained_samples: int
    """Number of samples with an advantage other than zero."""
    learning_rate: float
    changed_tensors: int
    """Number of weight tensors whose bytes differ from the previous version's."""
    empty_fraction: float
    """Fraction of samples whose response is empty or only the stop token."""
    repetitive_fraction: float
    """Fraction of samples that end in a short cycle, as `is_repetitive` decides."""
    length_stop_fraction: float
    """Fraction of samples cut off at the token limit."""
    mismatch_kl: float | None
    """In nats per token; None when it was not measured in this iteration."""


REPETITION_LENGTH = 16


def is_repetitive(tokens: Sequence[int]) -> bool:
    """Whether the last `REPETITION_LENGTH` tokens before the final one are a cycle of at most four tokens."""
    tail = list(tokens[-REPETITION_LENGTH - 1 : -1])
    if len(tail) < REPETITION_LENGTH:
        return False
    return any(tail[period:] == tail[:-period] for period in range(1, 5))


def constant_reward(history: Sequence[Observation]) -> str | None:
    """Every sample of several iterations has the same score."""
    recent = history[-CONSTANT_FOR:]
    if len(recent) < CONSTANT_FOR:
        return None
    low, high = min(o.reward_min for o in recent), max(o.reward_max for o in recent)
    if low != high:
        return None
    return (
        f"constant reward: every sample since iteration {recent[0].iteration} scored {low:g}, so nothing can be learned; "
        "check the reward, the labels and the answers in the sample log (or the task is solved)"
    )


def unchanged_weights(history: Sequence[Observation]) -> str | None:
    """A step that should have changed the policy left every tensor as it was."""
    last = history[-1]
    if last.changed_tensors > 0 or last.trained_samples == 0 or last.learning_rate == 0:
        return None
    return (
        f"unchanged weights: iteration {last.iteration} trained on {last.trained_samples} samples at lr {last.learning_rate:g}, "
        "but no weight differs from the previous version; the rate may be too small for the dtype, or the gradient is lost"
    )


def degenerate_output(history: Sequence[Observation]) -> str | None:
    """Most samples of several iterations are empty, one repeated cycle, or cut off at the limit."""
    recent = history[-SUSTAINED_FOR:]
    if len(recent) < SUSTAINED_FOR:
        return None
    kinds: tuple[tuple[str, Callable[[Observation], float], float], ...] = (
        ("empty", lambda o: o.empty_fraction, 0.5),
        ("a short cycle repeated", lambda o: o.repetitive_fraction, 0.5),
        ("cut off at max_new_tokens", lambda o: o.length_stop_fraction, 0.9),
    )
    found = [f"{min(map(of, recent)):.0%} {name}" for name, of, limit in kinds if min(map(of, recent)) > limit]
    if not found:
        return None
    return (
        f"degenerate output: since iteration {recent[0].iteration}, at least {', '.join(found)} of all responses; "
        "check the samples, the stop tokens and the learning rate"
    )


def growing_mismatch(history: Sequence[Observation], limit: float) -> str | None:
    """The mismatch between learner and replica on the same tokens stays above `limit`, or has grown `GROWTH`-fold."""
    measured = [o for o in history if o.mismatch_kl is not None]
    recent = [o.mismatch_kl for o in measured[-SUSTAINED_FOR:] if o.mismatch_kl is not None]
    if len(recent) < SUSTAINED_FOR:
        return None
    low = min(recent)
    where = "the replica may serve other weights, another temperature, or a kernel of lower precision"
    if low > limit:
        return f"growing mismatch: mismatch_kl is at least {low:.2g} for {SUSTAINED_FOR} iterations, limit {limit:.2g}; {where}"
    first = [o.mismatch_kl for o in measured[:SUSTAINED_FOR] if o.mismatch_kl is not None]
    if len(measured) >= 2 * SUSTAINED_FOR and low > GROWTH * max(first) and low > limit / GROWTH:
        return f"growing mismatch: mismatch_kl rose from {max(first):.2g} to at least {low:.2g} (limit {limit:.2g}); {where}"
    return None


def recent(history: Sequence[Observation]) -> list[Observation]:
    """The observations that the alarms still need: the first measurements of the mismatch, and the last observations."""
    last = max(CONSTANT_FOR, 2 * SUSTAINED_FOR)
    if len(history) <= last:
        return list(history)
    earlier = [o for o in history[:-last] if o.mismatch_kl is not None]
    return [*earlier[:SUSTAINED_FOR], *history[-last:]]


def announcements(holding: Mapping[str, str], before: Set[str], onsets: Counter[str]) -> list[str]:
    """The texts of the alarms that begin to hold. An alarm is announced at its first, second, fourth, eighth, ... onset, so one
    that comes and goes is announced only a few times.

    Args:
        holding: name -> text of the alarms that hold.
        before: names of the alarms that held after the previous iteration.
        onsets: how often each alarm began to hold; counted here.
    """
    texts = []
    for name in sorted(holding.keys() - before):
        onsets[name] += 1
        if onsets[name].bit_count() == 1:
            texts.append(holding[name] + (f" (it began {onsets[name]} times so far)" if onsets[name] > 1 else ""))
    return texts


def check(history: Sequence[Observation], mismatch_limit: float) -> dict[str, str]:
    """The alarms after the last observation, name -> text. `history` must not be empty."""
    found = {
        "constant_reward": constant_reward(history),
        "unchanged_weights": unchanged_weights(history),
        "degenerate_output": degenerate_output(history),
        "growing_mismatch": growing_mismatch(history, mismatch_limit),
    }
    return {name: text for name, text in found.items() if text is not None}
