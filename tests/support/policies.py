"""Policy versions of a tiny model, and the results of transformers with them.

Invariant: the same model and number give the same version.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from polyreme.weights.canary import LIMITS, Canary
from support.replicas import hf_weights


class Reference:
    """The same weights in `transformers`."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch, self._model = torch, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def load(self, weights: dict[str, np.ndarray]) -> None:
        tensors = {name: self._torch.tensor(array) for name, array in weights.items()}
        self._model.load_state_dict(tensors, strict=False)
        self._model.tie_weights()

    def greedy(self, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
        """Ids, and the log-probability of each."""
        ids = list(prompt)
        logprobs = []
        with self._torch.no_grad():
            for _ in range(tokens):
                row = self._model(self._torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(row.argmax()))
                logprobs.append(float(row[ids[-1]]))
        return ids[len(prompt) :], logprobs

    def canary(self, ids: list[int]) -> Canary:
        """The log-probabilities of ids[1:]."""
        with self._torch.no_grad():
            rows = self._model(self._torch.tensor([ids])).logits[0].log_softmax(-1)
        return Canary(tuple(ids), tuple(float(row[token]) for row, token in zip(rows, ids[1:], strict=False)), LIMITS["float32"])


def versions(model: Path, count: int) -> Iterator[dict[str, np.ndarray]]:
    """Weights that differ clearly from one version to the next."""
    weights, rng = hf_weights(model), np.random.default_rng(0)
    for _ in range(count):
        weights = {
            name: (array + 0.3 * array.std() * rng.normal(size=array.shape)).astype("<f4") for name, array in weights.items()
        }
        yield weights
