"""The environment `single_turn`: a run without environments makes the records that it made before there were environments."""

import asyncio
import json

import pytest
import xxhash

from polyreme_rollout.testing.simulated_engine import Lengths
from polyreme_trainer.orchestrator.main import orchestrate

FAST = {"lengths": Lengths(20, spread=0.5)}


def digest(groups):
    """Of all that index and attempt determine on one replica. (The version of a built-in reward changes with its code.)"""
    found = xxhash.xxh3_64()
    for group in sorted(groups, key=lambda group: group.index):
        found.update(json.dumps([group.index, group.attempt, group.prompt, group.label]).encode() + group.prompt_ids.tobytes())
        for sample in group.samples:
            parts = [[part.name, part.raw, part.weighted] for part in sample.parts]
            rest = [sample.finish_reason, sample.spans, sample.score, parts, sample.text, sample.replicas, len(sample.calls)]
            found.update(sample.token_ids.tobytes() + sample.logprobs.tobytes() + sample.loss_mask.tobytes())
            found.update(json.dumps(rest).encode())
    return found.hexdigest()


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, "078561b88c5d551f"),
        ({"algorithm": {"preset": "remax"}}, "171c86d4b8313d92"),
        ({"plugin": True, "reward": {}, "seed": 3}, "a96e1c3ccd689ec4"),
    ],
)
async def test_the_records_of_a_single_turn(world, sections, expected):
    async with world(FAST, iterations=1, **sections) as w:
        await asyncio.gather(orchestrate(w.run), w.train())
        groups = w.learner.trained[1]
        assert digest(groups) == expected
        assert not any(group.episodes for group in groups)
