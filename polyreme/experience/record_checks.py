"""Whether a group is consistent.

Invariant: a group that passes can be encoded, trained on and shown without further checks.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.errors import DataError
from polyreme.experience.records import Float32, GroupRecord, SampleRecord


def check_group(group: GroupRecord) -> None:
    """Raises DataError when the group is inconsistent."""
    if not group.samples or not len(group.prompt_ids):
        raise _bad(group, "a prompt and at least one sample", f"{len(group.prompt_ids)} prompt ids, {len(group.samples)} samples")
    for number, sample in enumerate(group.samples):
        problem = _problem(sample)
        if problem:
            raise _bad(group, *problem, sample=number)
    if problem := _problem_of_episodes(group):
        raise _bad(group, *problem)


def _problem_of_episodes(group: GroupRecord) -> tuple[str, str] | None:
    """What was expected and what was found where samples and episodes do not fit, else None."""
    if not group.episodes:
        if any(sample.turns or sample.episode or sample.prompt_ids is not None for sample in group.samples):
            return "episodes", "none, but trajectories"
        return None
    numbers = [sample.episode for sample in group.samples]
    if numbers != sorted(numbers) or set(numbers) != set(range(len(group.episodes))):
        return f"samples of {len(group.episodes)} episodes, in their order", f"samples of the episodes {numbers}"
    for one, other in pairwise(group.samples):
        if one.episode == other.episode and (one.score, one.parts) != (other.score, other.parts):
            return f"one score in all samples of episode {one.episode}", f"{one.score} and {other.score}"
    if bad := [each for each in group.episodes if each.outcome not in pb.Outcome.values()[1:]]:
        return "an outcome of every episode", str(bad[0].outcome)
    return None


def _problem(sample: SampleRecord) -> tuple[str, str] | None:
    """What was expected and what was found in an inconsistent sample, else None."""
    length = len(sample.token_ids)
    lengths = (length, len(sample.logprobs), len(sample.loss_mask))
    if sample.prompt_ids is not None and not len(sample.prompt_ids):
        return "a prompt of its own that is not empty", "an empty one"
    if length == 0 or len(set(lengths)) > 1:
        return "token_ids, logprobs and loss_mask of one length above 0", f"lengths {lengths}"
    if sample.finish_reason not in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH):
        return "a finish reason", str(sample.finish_reason)
    if (bad := _bad_numbers(sample.logprobs)) or not math.isfinite(sample.score):
        return "finite logprobs and score", f"score {sample.score}, {bad} bad logprobs"
    for name, numbers in (("token_rewards", sample.token_rewards), ("teacher_logprobs", sample.teacher_logprobs)):
        if numbers is not None and (len(numbers) != length or _bad_numbers(numbers)):
            return f"{length} finite {name}", f"{len(numbers)}, {_bad_numbers(numbers)} of them not finite"
    if sample.routes is not None and (sample.routes.ndim != 2 or len(sample.routes) != length or not sample.routes.size):
        return f"routes of {length} tokens", f"shape {sample.routes.shape}"
    if np.count_nonzero(sample.loss_mask > 1):
        return "a loss mask of 0 and 1", f"a {sample.loss_mask.max()}"
    if sample.turns:
        return _problem_of_turns(sample)
    at = 0
    for _, start, end in sample.spans:
        if start != at or end <= start:
            return f"version spans that follow each other and cover {length} tokens", str(sample.spans)
        at = end
    if at != length:
        return f"version spans that cover {length} tokens", str(sample.spans)
    return None


def _problem_of_turns(sample: SampleRecord) -> tuple[str, str] | None:
    length = len(sample)
    ranges = [(turn.start, turn.end) for turn in sample.turns]
    turns = _covered(ranges)
    if not turns or turns[0][0] != 0 or turns[-1][1] != length:
        return f"turns that follow each other, from token 0 up to token {length}", str(ranges)
    if _covered([(start, end) for _, start, end in sample.spans]) != turns:
        return f"version spans that follow each other and cover the turns {ranges}", str(sample.spans)
    if not all(math.isfinite(turn.reward) for turn in sample.turns):
        return "finite rewards of the turns", str([turn.reward for turn in sample.turns])
    for (_, start), (end, _) in pairwise(turns):
        if sample.loss_mask[start:end].any() or sample.logprobs[start:end].any():
            return f"neither loss mask nor log-probability at tokens {start} to {end}, outside of the turns", "some"
    return None


def _covered(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """What ranges (start, end) cover, as few ranges. None when one is empty or begins before the one before it ends."""
    covered: list[tuple[int, int]] = []
    for start, end in ranges:
        if end <= start or (covered and start < covered[-1][1]):
            return None
        if covered and start == covered[-1][1]:
            covered[-1] = (covered[-1][0], end)
        else:
            covered.append((start, end))
    return covered


def _bad_numbers(numbers: Float32) -> int:
    """How many are not finite. (On short arrays `count_nonzero` is several times faster than `all` and `sum`.)"""
    return len(numbers) - int(np.count_nonzero(np.isfinite(numbers)))


def _bad(group: GroupRecord, expected: str, found: str, sample: int | None = None) -> DataError:
    place = f"group {group.index}" + ("" if sample is None else f", sample {sample}")
    return DataError(
        f"{expected} in {place}",
        found,
        "Report this as a bug of the part that created or stored the group. The group must not be used.",
    )
