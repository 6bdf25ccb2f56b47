"""The calls that rank 0 of a learner makes on all ranks."""

import asyncio
import queue
import threading
from pathlib import Path

import numpy as np
import pytest
import yaml

from polyreme.config.serve import read_serve
from polyreme.config.trainer import LoraConfig
from polyreme.errors import ConfigError
from polyreme_trainer.learner.leader import LeaderError, Ranks
from polyreme_trainer.service.batch import Batch, LossCall, pack_call, read_call
from polyreme_trainer.service.errors import ModelLostError, TenantError
from polyreme_trainer.service.messages import AdamSettings
from polyreme_trainer.service.ranks import LeadingEngine, follow
from polyreme_trainer.testing.simulated_tenants import SimulatedTenantEngine

LORA, ADAM = LoraConfig(rank=3, targets=["q_proj"]), AdamSettings(learning_rate=0.5)
COLUMNS = {"weights": np.array([0.5, 1, -1e-9], np.float32), "other": np.array([1, 2, 3], np.float32)}
CALL = LossCall(Batch([np.array([5, 9]), np.array([7])], [np.array([9, 6]), np.array([3])], COLUMNS), "dpo", {"beta": 0.5})


class QueueChannel:
    """A channel between two threads."""

    def __init__(self) -> None:
        self._messages: queue.Queue[tuple[int, bytes]] = queue.Queue()

    def send(self, kind: int, payload: bytes) -> None:
        self._messages.put((kind, payload))

    def receive(self) -> tuple[int, bytes]:
        return self._messages.get(timeout=60)


def test_a_batch_arrives_with_the_same_bits() -> None:
    found = read_call(pack_call(CALL))
    assert (found.loss, found.options, list(found.batch.columns)) == ("dpo", {"beta": 0.5}, ["weights", "other"])
    columns = [(found.batch.columns[name], COLUMNS[name]) for name in COLUMNS]
    ids = [
        pair for name in ("inputs", "targets") for pair in zip(getattr(found.batch, name), getattr(CALL.batch, name), strict=True)
    ]
    assert all(one.dtype == other.dtype and np.array_equal(one, other) for one, other in [*ids, *columns])


async def lead(engine: LeadingEngine, folder: Path) -> None:
    async with engine.telling() as told:
        told.create("a", LORA, 3)
        told.create("b", None, 0)
        told.forward_backward({"a": CALL, "b": CALL})
        wrong = LossCall(Batch([np.array([99])], [np.array([5])], {}), "cross_entropy", {})
        assert isinstance(told.forward({"a": wrong})["a"], TenantError)
        assert told.optim_step("a", ADAM)[1] == 1 == told.steps("a")
        with pytest.raises(ModelLostError):
            told.load("c", folder / "deleted", LORA, 1)
        told.load("c", folder, LORA, 1)
        told.remove("b")
        assert told.models == {"a": LORA, "c": LORA}


def test_all_ranks_make_the_same_calls(tmp_path: Path) -> None:
    saved = SimulatedTenantEngine(64, 16)
    saved.create("c", LORA, 3)
    saved.save("c", tmp_path, gradient=True)
    channel, engines = QueueChannel(), [SimulatedTenantEngine(64, 16) for _ in range(2)]
    leading = LeadingEngine(engines[0], leader := Ranks(0, channel))
    thread = threading.Thread(target=asyncio.run, args=(lead(leading, tmp_path),))
    thread.start()
    follow(engines[1], Ranks(1, channel))
    thread.join()
    leader.close()
    assert engines[0].executed == engines[1].executed != []
    assert engines[0].passes == engines[1].passes
    assert engines[1].models == {"a": LORA, "c": LORA}


def test_the_others_hear_why_rank_0_has_failed() -> None:
    leader = Ranks(0, channel := QueueChannel())

    async def fail() -> None:
        async with LeadingEngine(SimulatedTenantEngine(64, 16), leader).telling() as told:
            told.create("a", LORA, 3)
            raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        asyncio.run(fail())
    leader.close()
    other = SimulatedTenantEngine(64, 16)
    with pytest.raises(LeaderError, match="no disk"):
        follow(other, Ranks(1, channel))
    assert other.executed == ["create"]


class Asked(QueueChannel):
    """The channel of ranks that have been asked to end: the others are gone."""

    def send(self, kind: int, payload: bytes) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_rank_that_is_asked_to_end_ends_well() -> None:
    """Rank 0 while its peers are gone, and another rank when rank 0 is cancelled in the middle of what it waits for."""

    async def lead_until(cancelled: bool, ranks: Ranks) -> None:
        async with LeadingEngine(SimulatedTenantEngine(64, 16), ranks).telling():
            if cancelled:
                raise asyncio.CancelledError

    asyncio.run(lead_until(False, lonely := Ranks(0, Asked())))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(lead_until(True, leader := Ranks(0, channel := QueueChannel())))
    with pytest.raises(LeaderError) as caught:
        follow(SimulatedTenantEngine(64, 16), Ranks(1, channel))
    assert caught.value.exit_code == 0
    lonely.close()
    leader.close()


def test_one_rank_calls_the_engine_itself() -> None:
    engine, ranks = SimulatedTenantEngine(64, 16), Ranks()

    async def yielded() -> object:
        async with LeadingEngine(engine, ranks).telling() as told:
            return told

    assert asyncio.run(yielded()) is engine
    ranks.close()


@pytest.mark.parametrize(
    ("learner", "found"),
    [
        ({"parallel": {"data": 2, "nodes": 2}}, "on one machine"),
        ({"parallel": {"pipeline": 2}, "recompute": "full"}, "`recompute` must be null"),
    ],
)
def test_impossible_layouts_are_refused(learner: dict[str, object], found: str, tmp_path: Path) -> None:
    sampler = {"engine": "transformers", "max_model_len": 64}
    (file := tmp_path / "serve.yaml").write_text(yaml.safe_dump({"model": {"path": "x"}, "sampler": sampler, "learner": learner}))
    with pytest.raises(ConfigError, match=found):
        read_serve(file)
