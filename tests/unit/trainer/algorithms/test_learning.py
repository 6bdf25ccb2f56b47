"""Every whole preset solves a small task, so its advantages and losses have the right signs."""

import numpy as np
import pytest
import torch

from polyreme.config.recipes.presets import PRESETS, resolve
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import TokenBatch
from polyreme_trainer.algorithms.inputs import LossInputs
from polyreme_trainer.algorithms.state import INITIAL

LENGTH, VOCABULARY, GROUPS, SAMPLES, ITERATIONS, STEP = 3, 5, 6, 8, 12, 0.7
TARGET = np.array([2, 0, 4])


class Task:
    """A table of logits that must learn to generate TARGET. The score is the fraction of right tokens, in two parts.

    A teacher generates each token of TARGET with probability 0.9.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm, self.state = algorithm, INITIAL
        self.random = np.random.default_rng(0)
        self.logits = torch.zeros(LENGTH, VOCABULARY, dtype=torch.float64, requires_grad=True)
        self.critic = torch.zeros(LENGTH, dtype=torch.float64, requires_grad=True)

    def expected_score(self) -> float:
        probabilities = self.logits.detach().softmax(-1)
        return float(probabilities[torch.arange(LENGTH), torch.from_numpy(TARGET)].mean())

    def sample(self) -> tuple[TokenBatch, np.ndarray]:
        """A batch and its tokens [n, LENGTH]; with a greedy sample per group where the algorithm needs one."""
        probabilities = self.logits.detach().softmax(-1).numpy()
        n = GROUPS * SAMPLES
        columns = [self.random.choice(VOCABULARY, n, p=p / p.sum()) for p in probabilities]
        tokens, group, greedy = np.stack(columns, 1), np.repeat(np.arange(GROUPS), SAMPLES), np.zeros(n, dtype=bool)
        if self.algorithm.needs.greedy:
            tokens = np.concatenate([tokens, np.tile(probabilities.argmax(1), (GROUPS, 1))])
            group, greedy = np.append(group, np.arange(GROUPS)), np.append(greedy, np.ones(GROUPS, dtype=bool))
        right = (tokens == TARGET).astype(np.float64)
        behaviour = np.log(probabilities[np.arange(LENGTH), tokens]).reshape(-1).astype(np.float32)
        batch = TokenBatch(
            offsets=LENGTH * np.arange(len(tokens) + 1),
            mask=np.repeat(~greedy, LENGTH).astype(np.float32),
            behaviour=behaviour,
            version=np.zeros(len(behaviour), dtype=np.int32),
            group=group,
            score=right.mean(1),
            truncated=np.zeros(len(tokens), dtype=bool),
            greedy=greedy,
            old=behaviour,
            teacher=np.where(right > 0, np.log(0.9), np.log(0.1 / (VOCABULARY - 1))).reshape(-1).astype(np.float32),
            reference=np.full(len(behaviour), -np.log(VOCABULARY), dtype=np.float32),
            values=np.tile(self.critic.detach().numpy(), len(tokens)).astype(np.float32),
            parts=np.stack([right[:, 0], right[:, 1:].mean(1)], 1),
            part_names=("first", "rest"),
            part_weights=(1 / 3, 2 / 3),
        )
        return batch, tokens

    def iterate(self) -> None:
        """One step of normalised gradient descent."""
        batch, tokens = self.sample()
        found = self.algorithm.advantages(batch, self.state)
        self.state = found.state
        step, trained = np.arange(len(batch)), torch.from_numpy(batch.trained)
        position = torch.arange(LENGTH).repeat(len(batch))[trained]
        logprobs = self.logits.log_softmax(-1)[position, torch.from_numpy(tokens.reshape(-1))[trained]]

        def pick(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array.astype(np.float64))[trained]

        assert batch.old is not None and batch.reference is not None and batch.values is not None
        inputs = LossInputs(
            logprobs=logprobs,
            old=pick(batch.old),
            behaviour=pick(batch.behaviour),
            advantages=pick(found.advantages),
            weight=pick(self.algorithm.coefficients(batch, found, step)),
            sequence=torch.from_numpy(batch.sequence_of)[trained],
            sequences=len(batch),
            reference=pick(batch.reference),
        )
        loss, _ = self.algorithm.loss(inputs)
        if found.returns is not None:
            weight = self.algorithm.critic_coefficients(batch, step)
            others = map(pick, (batch.values, found.returns, weight))
            loss = loss + self.algorithm.critic_loss(self.critic[position], *others)[0]
        for parameter in (self.logits, self.critic):
            (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)
            if gradient is not None and gradient.norm() > 0:
                with torch.no_grad():
                    parameter -= STEP * gradient / gradient.norm()


OVERRIDES = {"raft": {"advantage": {"threshold": 0.5}}}  # a score of 0 is rare and nearly all would be accepted


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_learns(name: str) -> None:
    task = Task(Algorithm(resolve(name, OVERRIDES.get(name, {})), longest=LENGTH))
    assert task.expected_score() == pytest.approx(1 / VOCABULARY)
    for _ in range(ITERATIONS):
        task.iterate()
    assert task.expected_score() > 0.6
