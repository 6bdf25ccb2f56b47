"""Helpers that create partial rollouts and a replica's messages with tokens."""

import numpy as np

from polyreme.api.v1 import rollout_pb2
from polyreme_trainer.orchestrator.generation.partial_rollouts import PartialRollouts


def rollouts(max_new: int = 64, count: int = 2) -> PartialRollouts:
    return PartialRollouts(count, max_new, (1,))


def chunk(slot: int, ids: list[int], version: int = 0) -> rollout_pb2.GenerateResponse:
    array = np.array(ids, "<i4")
    logprobs = (-array).astype("<f4").tobytes()
    return rollout_pb2.GenerateResponse(
        chunks=[rollout_pb2.Chunk(slot=slot, token_ids=array.tobytes(), logprobs=logprobs, oldest_version=version)]
    )
