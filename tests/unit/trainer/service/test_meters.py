"""What a step of a served model cost: tokens, and where its time went."""

import numpy as np
import pytest

from polyreme_trainer.service.batch import Batch
from polyreme_trainer.service.observer.busy import BusyTime
from polyreme_trainer.service.observer.meters import StepMeters


def batch(weights: list[float]) -> Batch:
    ids = np.arange(len(weights), dtype=np.int64)
    return Batch([ids], [ids], {"weights": np.array(weights, dtype=np.float32)})


def test_a_step_sums_its_batches() -> None:
    meters = StepMeters()
    meters.add_batch("a", batch([0, 1, 1]), 6.0)
    meters.add_batch("a", batch([1, 1]), 2.0)
    assert meters.take_tokens("a") == 5 and meters.take_tokens("a") == 0
    meters.add_step("a", 0.5, 0.01, 7)
    record = meters.executed("a", 0.0, 0.0, 1.0)
    assert record is not None
    assert record.metrics["loss"] == 2.0 and record.metrics["loss_sum"] == 8.0
    assert (record.metrics["tokens"], record.metrics["trained_tokens"], record.metrics["sequences"]) == (5, 4, 2)
    assert (record.metrics["grad_norm"], record.metrics["lr"], record.metrics["optimizer_steps"]) == (0.5, 0.01, 7.0)


def test_the_tokens_of_a_critic_are_those_of_its_mask() -> None:
    meters, ids = StepMeters(), np.arange(3)
    given = {"returns": [0, 1, 2], "values": [0, 0, 0], "mask": [0, 1, 1]}
    columns = {name: np.array(column, dtype=np.float32) for name, column in given.items()}
    meters.add_batch("a", Batch([ids], [ids], columns), 3.0)
    meters.add_step("a", 0.5, 0.01, 1)
    record = meters.executed("a", 0.0, 0.0, 1.0)
    assert record is not None and (record.metrics["loss"], record.metrics["trained_tokens"]) == (1.5, 2)


def test_the_times_of_a_step_add_up_to_the_time_since_the_last() -> None:
    meters = StepMeters()
    meters.add_step("a", 0.5, 0.01, 1)
    assert meters.executed("a", arrived=0.0, began=1.0, ended=2.0) is not None
    assert meters.executed("a", arrived=5.0, began=6.0, ended=8.0) is None  # 3 s without a request, 1 s in the queue
    meters.add_step("a", 0.5, 0.01, 2)
    record = meters.executed("a", arrived=5.0, began=11.0, ended=11.5)  # arrived with the one before, then others had their turn
    assert record is not None
    times = {name: record.metrics[f"time/{name}"] for name in ("step", "execute", "queue", "client")}
    assert times == {"step": 9.5, "execute": 2.5, "queue": 4.0, "client": 3.0}


def test_what_a_restart_executes_again_is_not_reported() -> None:
    meters = StepMeters()
    with meters.replaying("a"):
        meters.add_batch("a", batch([1, 1]), 4.0)
        meters.add_step("a", 0.5, 0.01, 1)
        meters.add_batch("a", batch([1]), 3.0)
    assert meters.take_tokens("a") == 0
    assert meters.executed("a", 0.0, 0.0, 1.0) is None
    meters.add_step("a", 0.5, 0.01, 2)
    record = meters.executed("a", 1.0, 1.0, 2.0)
    assert record is not None and record.metrics["loss"] == 3.0, "the next step has the batches before the restart"


def test_busy_is_a_fraction_of_the_last_minute() -> None:
    busy = BusyTime()
    assert busy.fraction("learner", 0.0, 100.0) is None
    assert busy.fraction("learner", 30.0, 115.0) == pytest.approx(0.5)
    assert busy.fraction("learner", 60.0, 145.0) == pytest.approx(0.75)
    assert busy.fraction("learner", 120.0, 145.0) == pytest.approx(0.0)
