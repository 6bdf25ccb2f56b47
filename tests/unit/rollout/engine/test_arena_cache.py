"""The arenas that a replica has mapped."""

import uuid

import numpy as np

from polyreme.weights.arena import Arena
from polyreme.weights.manifest import TensorSpec, plan_manifest, tensor_views
from polyreme_rollout.engine.arena_cache import ArenaCache

LAYOUT = plan_manifest([TensorSpec("a", "F32", (3,)), TensorSpec("b", "F32", (2, 2))], {"c": "a"})


def test_a_replaced_arena_is_detected() -> None:
    run_id, cache = f"test-{uuid.uuid4().hex[:12]}", ArenaCache()
    first = Arena.create(run_id, LAYOUT.nbytes)
    path = str(first.path)
    tensor_views(LAYOUT, first.slot_view(0))["a"][...] = 5.0
    assert cache.at(path).nonce == first.nonce
    second = Arena.create(run_id, LAYOUT.nbytes)
    assert cache.at(path).nonce == second.nonce
    kept = tensor_views(LAYOUT, cache.with_nonce(path, first.nonce).slot_view(0))
    assert np.all(kept["a"] == 5.0)
    second.close()
    first.close()
    cache.close()
