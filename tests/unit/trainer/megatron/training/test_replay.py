"""Reported routes have one or two bytes per expert, and impossible routes are refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from metric_rows import REPLAY

from polyreme.api.v1 import experience_pb2 as pb
from polyreme.errors import DataError
from polyreme.experience.record_codec import decode_group, encode_group
from polyreme.experience.records import EpisodeRecord, GroupRecord, SampleRecord, Turn
from polyreme_trainer.megatron.batches.batch import Sequences, pack
from polyreme_trainer.megatron.batches.samples import collect
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface.families import read_architecture
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.training.replay import decode_routes, mismatch
from support.configs import GLM4_MOE, MIXTRAL


def arch(experts: int) -> Architecture:
    return read_architecture(HfConfig(MIXTRAL | {"num_local_experts": experts}))


def sample(routes: Any, tokens: int = 3) -> SampleRecord:
    return SampleRecord(
        token_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.zeros(tokens, np.float32),
        loss_mask=np.ones(tokens, np.uint8),
        finish_reason=pb.FINISH_REASON_STOP,
        spans=[(0, 0, tokens)],
        score=0.0,
        routes=routes,
    )


@pytest.mark.parametrize(("experts", "dtype"), [(256, "u1"), (257, "<u2")])
def test_routes_pass_through_the_log_and_into_micro_batches(experts: int, dtype: str) -> None:
    """Position p of a micro-batch has the experts that sampled token p + 1; the prompt has none."""
    routes = np.random.default_rng(1).random((3, 2, experts)).argsort(-1)[..., :2].astype(dtype)
    group = GroupRecord(1, 1, np.array([7, 8], np.int32), [sample(routes.view("u1").reshape(3, -1))])
    read = decode_group(encode_group(group))
    np.testing.assert_array_equal(decode_routes(read.samples[0], arch(experts)), routes)
    sequences, _ = collect([read], routes=lambda each: decode_routes(each, arch(experts)))
    batch = pack(sequences.take(np.array([0])), np.array([0]), Device("cpu").torch)
    assert batch.routes is not None and batch.routes.shape == (4, 2, 2)
    assert (batch.routes[0] == -1).all()
    np.testing.assert_array_equal(batch.routes[1:].numpy(), routes)
    assert batch.real.all()


@pytest.mark.parametrize(("experts", "dtype"), [(256, "u1"), (257, "<u2")])
def test_the_learners_router_decides_for_the_environments_tokens(experts: int, dtype: str) -> None:
    """Their reported experts mean nothing and may be equal."""
    routes = np.random.default_rng(1).random((5, 2, experts)).argsort(-1)[..., :2].astype(dtype)
    routes[2:4] = 0
    turns, mask = (Turn(0, 2), Turn(4, 5)), np.array([1, 1, 0, 0, 1], np.uint8)
    made = replace(sample(routes.view("u1").reshape(5, -1), 5), loss_mask=mask, spans=[(0, 0, 2), (0, 4, 5)], turns=turns)
    group = GroupRecord(1, 1, np.array([7, 8], np.int32), [made], episodes=[EpisodeRecord(pb.OUTCOME_STOP)])
    sequences, _ = collect([group], routes=lambda each: decode_routes(each, arch(experts)))
    batch = pack(sequences, np.array([0]), Device("cpu").torch)
    assert batch.routes is not None and (batch.routes[[0, 3, 4]] == -1).all()
    np.testing.assert_array_equal(batch.routes[[1, 2, 5]].numpy(), routes[[0, 1, 4]])
    routes[4] = 0
    with pytest.raises(DataError, match="twice"):
        decode_routes(replace(made, routes=routes.view("u1").reshape(5, -1)), arch(experts))


def test_only_layers_with_experts_have_routes() -> None:
    routes = np.random.default_rng(1).random((3, 3, 4)).argsort(-1)[..., :2].astype("u1")
    glm = read_architecture(HfConfig(GLM4_MOE))
    np.testing.assert_array_equal(decode_routes(sample(routes.reshape(3, -1)), glm), routes)
    with pytest.raises(DataError) as caught:
        decode_routes(sample(np.zeros((3, 8), np.uint8)), glm)
    assert "3 layers x 2 of 4 experts" in caught.value.expected


@pytest.mark.parametrize(
    "routes",
    [
        None,
        np.zeros((3, 3), np.uint8),
        np.tile(np.array([0, 1, 2, 4], np.uint8), (3, 1)),
        np.tile(np.array([0, 1, 2, 2], np.uint8), (3, 1)),
    ],
    ids=["none", "width", "unknown expert", "one twice"],
)
def test_what_no_router_of_the_model_chose_is_refused(routes: Any) -> None:
    good = sample(np.tile(np.array([0, 1, 2, 3], np.uint8), (3, 1)))
    assert decode_routes(good, arch(4)).shape == (3, 2, 2)
    with pytest.raises(DataError):
        decode_routes(replace(good, routes=routes), arch(4))


class Actor:
    """A role whose log-probabilities equal the replica's with the replica's experts, and are `drift` lower with its own."""

    def __init__(self, drift: float, replays: bool) -> None:
        self.drift, self.replays = drift, replays

    def forward(self, sequences: Sequences, indices: np.ndarray) -> np.ndarray:
        values = np.zeros(len(sequences.mask), np.float32)
        for index in indices:
            values[sequences.offsets[index] : sequences.offsets[index + 1]] = 0.0 if self.replays else -self.drift
        return values


def test_the_mismatch_is_measured_with_the_replicas_experts_and_with_the_learners() -> None:
    """Only the sampled tokens of the given sequences count; the others have a different mismatch."""
    routes = np.tile(np.array([0, 1, 2, 3], np.uint8), (3, 1))
    stale = replace(sample(routes), logprobs=np.full(3, -5.0, np.float32))
    sequences, tokens = collect([GroupRecord(1, 1, np.array([7, 8], np.int32), [sample(routes), stale])])
    actor: Any = Actor(0.5, replays=True)
    found = mismatch(actor, sequences, tokens, np.array([0]))
    assert set(found) == {metric.name for metric in REPLAY} and actor.replays
    assert found["moe/mismatch_kl_replayed"] == 0
    assert found["moe/mismatch_kl_routed"] == pytest.approx(np.exp(-0.5) - 1 + 0.5)
    assert mismatch(actor, sequences, tokens, np.array([], np.int64)) == {}
