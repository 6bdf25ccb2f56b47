"""Seeded samples with chunked prompts on CPU.

Invariant: a seeded sample is the same whether its prompt was computed in one step or in several.

vLLM's sampler also draws for a prompt that a step leaves incomplete, discards the draw, and sets the request's generator back by an offset.
torch's generators have no offset on CPU, so the engine would crash. Here such a request draws from another generator in that step.
"""

from typing import Any

import numpy as np
import torch


class DiscardedDraw(torch.Generator):
    """A generator for draws that are discarded: setting it back does nothing."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        return self


def spare_generators(runner: Any) -> None:
    """Makes a model runner of vLLM on CPU draw for incomplete prompts from `DiscardedDraw`. Call it once."""
    sample_tokens = runner.sample_tokens

    def sampling(*arguments: object, **options: object) -> object:
        generators, running = runner.input_batch.generators, runner.input_batch.num_reqs
        incomplete = np.flatnonzero(runner.discard_request_mask.np[:running]).tolist()
        spared = {place: generators[place] for place in incomplete if place in generators}
        generators.update({place: DiscardedDraw() for place in spared})
        try:
            return sample_tokens(*arguments, **options)
        finally:
            generators.update(spared)

    runner.sample_tokens = sampling
