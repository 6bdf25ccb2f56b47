"""The step around the model: what is measured of which policy."""

from typing import Any

import numpy as np
import torch

from polyreme.config.run import AlgorithmConfig
from polyreme.experience.records import GroupRecord, SampleRecord
from polyreme_trainer.megatron.batch import collect
from polyreme_trainer.megatron.step import Layout, train_iteration


class Drifting:
    """A policy that gives every token the log-probability -1 until it is stepped, and -2 from then on. It is its own optimizer."""

    steps = 0

    def logprobs(self, ids: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
        return torch.full(targets.shape, -1.0 - self.steps)

    def zero_grad(self) -> None: ...
    def set_lr(self, lr: float) -> None: ...

    def step(self) -> float:
        self.steps += 1
        return 0.0


def test_an_iteration_without_advantages_measures_the_policy_that_sampled() -> None:
    """The optimizer's moments move the weights even then."""
    ids = np.arange(4, dtype=np.int32)
    sample = SampleRecord(
        token_ids=ids, logprobs=np.full(4, -1.0, np.float32), loss_mask=np.ones(4, np.uint8), finish_reason=1, spans=[(0, 0, 4)],
        score=1.0, parts=[], text="",
    )  # fmt: skip
    group = GroupRecord(
        index=0, attempt=1, prompt_ids=ids, samples=[sample, sample], prompt="", label="", generate_seconds=0.0, score_seconds=0.0
    )
    policy: Any = Drifting()
    layout = Layout(torch.device("cpu"), 0, 1, lambda tensor: None, 64, 1000)
    trained = train_iteration(
        policy,
        None,
        policy,
        layout,
        collect([group], np.zeros((1, 2), np.float32), 0),
        2,
        AlgorithmConfig(),
        1.0,
        1e-3,
        (0, 1),
        None,
    )
    assert policy.steps == 1
    assert trained.mismatch_kl == 0.0
