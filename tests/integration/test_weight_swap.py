"""Pushed weights in real vLLM: the replica uses exactly the pushed weights, name by name and token by token."""

import asyncio
import json
import os
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from polyreme.api.v1 import rollout_pb2
from polyreme.weights.delta import diff
from polyreme.weights.manifest import Manifest, TensorSpec, plan_manifest
from polyreme_trainer.weight_sync.replica_client import ReplicaClient, SwapError
from polyreme_trainer.weight_sync.version import Version
from support.models import Kind, tiny_model
from support.policies import Reference, versions
from support.replicas import CALL_SECONDS, Learner, generate, model_files, replica, request, rollout_config
from support.worker_weights import digest, rank_weights

TESTS = Path(__file__).resolve().parents[1]
PROMPT = [5, 6, 7, 8, 9]
WRONG = "model.layers.1.self_attn.k_proj.weight"
LAYOUTS = [("tied", 1), ("untied", 1), ("tied", 2), ("untied", 2)]


@pytest.mark.real
@pytest.mark.parametrize(("kind", "parallel"), LAYOUTS)
async def test_answers_are_those_of_the_pushed_weights(kind: Kind, parallel: int, redis_url: str, tmp_path: Path) -> None:
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    model = tiny_model(kind, tmp_path / "model", hidden_size=128)
    reference = Reference(model)
    config = rollout_config(model, tensor_parallel=parallel)
    async with replica(redis_url, run_id, model, tmp_path / "replica.log", config) as there:
        learner = Learner.of(run_id, model)
        try:
            for version, weights in enumerate(versions(model, 3)):
                committed = await learner.push(there.weights, version, weights)
                assert committed.stall_seconds >= committed.reload_seconds > 0
                reference.load(weights)
                ids, logprobs = reference.greedy(PROMPT, 32)
                answer = (await generate(there.rollout, request(run_id, PROMPT, [(0, [], 32, 0)])))[0]
                assert answer.ids == ids
                assert answer.logprobs == pytest.approx(logprobs, abs=1e-4)
                assert answer.spans == [(version, 0, 32)]
            await broken_version_is_rolled_back(learner, there, weights)
            assert (await generate(there.rollout, request(run_id, PROMPT, [(0, [], 32, 0)])))[0].ids == ids
            await learner.push(there.weights, 9, next(versions(model, 1)))
            answer = (await generate(there.rollout, request(run_id, PROMPT, [(0, [], 32, 0)])))[0]
            assert answer.ids != ids
            assert answer.spans == [(9, 0, 32)]
            await streamed_versions_are_served_and_gone_back_to(learner, there, model, reference)
            assert not [
                name for name in os.listdir("/dev/shm") if name.startswith("vllm_dist_")
            ]  # also while it runs, so that a kill leaves nothing
        finally:
            learner.arena.close()


async def streamed_versions_are_served_and_gone_back_to(learner: Learner, there: Any, model: Path, reference: Reference) -> None:
    """Streams as from another host, into the replica's own memory, from which its workers load."""
    link = ReplicaClient(there.lease, learner.arena)

    async def push(version: int, weights: dict[str, np.ndarray]) -> None:
        staging = learner.write(version, weights)
        sent = Version(staging.manifest, staging.slot, staging.generation)
        await link.stream(sent)
        await link.commit(sent)

    for version, weights in enumerate(versions(model, 3), start=10):
        await push(version, weights)
        reference.load(weights)
        ids, _ = reference.greedy(PROMPT, 32)
        answer = (await generate(there.rollout, request(learner.run_id, PROMPT, [(0, [], 32, 0)])))[0]
        assert (answer.ids, answer.spans) == (ids, [(version, 0, 32)])
    good, learner.layout = learner.layout, misshapen(learner.layout, weights)
    with pytest.raises(SwapError, match="version 12 is served again"):
        await push(13, {name: array for name, array in weights.items() if name != WRONG})
    learner.layout = good
    answer = (await generate(there.rollout, request(learner.run_id, PROMPT, [(0, [], 32, 0)])))[0]
    assert (answer.ids, answer.spans) == (ids, [(12, 0, 32)])
    await deltas_and_canaries(learner, there, link, reference, weights)
    await link.close()


async def deltas_and_canaries(
    learner: Learner, there: Any, link: ReplicaClient, reference: Reference, weights: dict[str, np.ndarray]
) -> None:
    """Sparse versions on top of the streamed one: the workers' answers follow the new weights, and a canary detects wrong ones."""
    rng, ask = np.random.default_rng(1), request(learner.run_id, PROMPT, [(0, [], 32, 0)])
    before, base = learner.write(12, weights), learner.slot
    old = Manifest.from_proto(before.manifest)
    for version in (14, 15, 16):
        weights = {name: np.where(rng.random(a.shape) < 0.02, a * np.float32(1.5), a) for name, a in weights.items()}
        staged = learner.write(version, weights)
        delta = diff(
            old, learner.arena.slot_view(base), Manifest.from_proto(staged.manifest), learner.arena.slot_view(learner.slot)
        )
        assert delta is not None
        reference.load(weights)
        canary = reference.canary([*PROMPT, 3, 2, 1])
        if version == 15:
            canary = replace(canary, logprobs=tuple(value - 0.1 for value in canary.logprobs))
        sent = Version(staged.manifest, staged.slot, staged.generation, canary.to_proto())
        assert (await link.stream_delta(delta)).nbytes < old.nbytes / 8
        if version == 15:
            with pytest.raises(SwapError, match=r"version 15 failed its canary.*nothing is served"):
                await link.commit(sent)
            with pytest.raises(grpc.aio.AioRpcError, match="found none"):
                await generate(there.rollout, ask)
        else:
            assert (await link.commit(sent)).canary_difference < 1e-4
            answer = (await generate(there.rollout, ask))[0]
            assert (answer.ids, answer.spans) == (reference.greedy(PROMPT, 32)[0], [(version, 0, 32)])
        old, base = Manifest.from_proto(staged.manifest), learner.slot


def misshapen(good: Manifest, weights: dict[str, np.ndarray]) -> Manifest:
    """The layout with one tensor of the wrong shape, inside a fused layer."""
    specs = [TensorSpec(name, "F32", (3, 3) if name == WRONG else array.shape) for name, array in sorted(weights.items())]
    return plan_manifest(specs, {tensor.name: tensor.alias_of for tensor in good.tensors if tensor.alias_of})


async def broken_version_is_rolled_back(learner: Learner, there: Any, weights: dict[str, np.ndarray]) -> None:
    """A version with one tensor of the wrong shape in a fused layer has correct digests and names, but cannot be loaded."""
    good, learner.layout = learner.layout, misshapen(learner.layout, weights)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await learner.push(there.weights, 5, {name: array for name, array in weights.items() if name != WRONG})
    learner.layout = good
    assert refused.value.code() == grpc.StatusCode.INTERNAL
    assert "version 2 is served again" in refused.value.details()
    answer = await there.rollout.Describe(rollout_pb2.DescribeRequest(), timeout=300)
    assert (answer.has_version, answer.version, answer.quarantined) == (True, 2, False)


@pytest.mark.real
@pytest.mark.parametrize("parallel", [1, 2])
async def test_a_canary_is_answered_while_samples_take_all_slots(parallel: int, redis_url: str, tmp_path: Path) -> None:
    """The same weights are pushed during the samples, so these have the same tokens with and without the canary."""
    run_id, places, length = f"test-{uuid.uuid4().hex[:12]}", 2, 400
    model = tiny_model("tied", tmp_path / "model", hidden_size=128, context=1024)
    weights, reference = next(versions(model, 1)), Reference(model)
    reference.load(weights)
    canary = reference.canary([*PROMPT, 3, 2, 1])
    config = rollout_config(model, tensor_parallel=parallel, max_model_len=1024, max_new_tokens=length, max_num_seqs=places)
    async with replica(redis_url, run_id, model, tmp_path / "replica.log", config) as there:
        learner = Learner.of(run_id, model)
        link = ReplicaClient(there.lease, learner.arena)
        try:
            await learner.push(there.weights, 0, weights)
            ask = request(run_id, PROMPT, [(place, [], length, place) for place in range(2 * places)], temperature=1.0)
            alone = await generate(there.rollout, ask)
            for version in range(1, 20):
                samples = asyncio.ensure_future(generate(there.rollout, ask))
                await asyncio.sleep(0.2)  # to be in the middle of the first samples; another turn follows if it is not
                staged = learner.write(version, weights)
                await there.weights.StageArena(staged, timeout=CALL_SECONDS)
                sent = Version(staged.manifest, staged.slot, staged.generation, canary.to_proto())
                assert (await link.commit(sent)).canary_difference < 1e-4
                answers = await samples
                assert [answers[place].ids for place in answers] == [alone[place].ids for place in alone]
                if [len(answers[place].spans) for place in range(places)] == [2] * places:
                    break  # the first samples ran before and after the canary
            else:
                raise AssertionError("no version was swapped while samples took all slots")
        finally:
            await link.close()
            learner.arena.close()


@pytest.mark.real
@pytest.mark.parametrize(("kind", "parallel"), LAYOUTS)
def test_the_workers_hold_the_pushed_tensors(kind: Kind, parallel: int, tmp_path: Path) -> None:
    model = tiny_model(kind, tmp_path / "model", hidden_size=128)
    (files := tmp_path / "files").mkdir()
    for name, data in model_files(model).items():
        (files / name).write_bytes(data)
    learner = Learner.of(f"test-{uuid.uuid4().hex[:12]}", model)
    try:
        pushed = list(versions(model, 2))
        stagings = []
        for version, weights in enumerate(pushed):
            stagings.append(tmp_path / f"{version}.pb")
            stagings[-1].write_bytes(learner.write(version, weights).SerializeToString())
        command = [sys.executable, "-m", "support.engine_digests", str(files), str(parallel), *map(str, stagings)]
        environment = os.environ | {"PYTHONPATH": str(TESTS)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        for weights, loaded in zip(pushed, json.loads(done.stdout.splitlines()[-1]), strict=True):
            workers = loaded["workers"]
            assert len(workers) == parallel
            for rank, answer in enumerate(workers):
                expected = {name: digest(array) for name, array in rank_weights(weights, kind == "tied", rank, parallel).items()}
                assert {name: (tuple(shape), value) for name, (shape, value) in answer.items()} == expected
    finally:
        learner.arena.close()
