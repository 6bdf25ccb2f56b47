"""Runs this rank's models on a few tokens, to compare them with the Hugging Face model and with replicas.

Invariant: no model changes. Every method is collective, and gates are returned on rank 0 only.
"""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from polyreme.config.run import RunConfig
from polyreme.weights.canary import Canary, limit_of
from polyreme_trainer.learner.gates import LIMITS, Answer, Gate, stack
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.batches.batch import IGNORE
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface.export import CRITIC
from polyreme_trainer.megatron.mcore import parallel_state
from polyreme_trainer.megatron.models.critic import Critic
from polyreme_trainer.megatron.models.pipeline import on_every_stage
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.probes import comparison

CANARY_TOKENS = 32


class ModelProbes:
    """The canary, and the numbers of the start gates.

    Args:
        config: of the run.
        policy, critic: the models; None for a run without a critic.
        ranks, device: the learner's ranks and this rank's device.
    """

    def __init__(self, config: RunConfig, policy: Policy, critic: Critic | None, ranks: Ranks, device: Device) -> None:
        self._config, self._policy, self._critic, self._ranks, self._device = config, policy, critic, ranks, device
        self._limits = LIMITS[config.model.dtype]
        self._hf: torch.nn.Module | None = None
        """The Hugging Face model of the last comparison, kept until replicas are compared with it. On rank 0."""

    def canary(self) -> Canary | None:
        """The policy's canary; None on later data ranks, unless their models take part with other experts. Collective."""
        if parallel_state.get_data_parallel_rank() and not self._policy.arch.experts:
            return None
        length = min(CANARY_TOKENS, self._config.rollout.max_model_len - 1)  # the engine samples one more
        ids = comparison.probe_ids(self._policy.arch.vocab, length, self._config.seed)[0].numpy()
        logprobs = self.answer_logprobs([Answer(ids[:1], ids[1:], np.empty(0, np.float32))], temperature=1.0)
        limit = limit_of(self._config.model.dtype, self._config.weights.canary_limit)
        return Canary(tuple(ids.tolist()), tuple(logprobs.tolist()), limit)

    def compare_hf(self, path: Path) -> Sequence[Gate]:
        """See `TrainEngine`. Collective."""
        length = min(32, self._policy.arch.max_position)
        ids = comparison.probe_ids(self._policy.arch.vocab, length, self._config.seed)
        logits = outputs(self._policy, ids.to(self._device.torch))
        values = None if self._critic is None else outputs(self._critic, ids.to(self._device.torch))
        outcomes: list[Gate] = []

        async def compare() -> None:
            self._hf = await asyncio.to_thread(comparison.load_hf, path, self._config.model.dtype)
            outcomes.append(await asyncio.to_thread(comparison.logits_gate, logits, self._hf, ids, self._limits))
            if values is not None and (critic := path / CRITIC).is_dir():
                classifier = await asyncio.to_thread(comparison.load_hf_critic, critic, self._config.model.dtype)
                outcomes.append(await asyncio.to_thread(comparison.values_gate, values, classifier, ids, self._limits))

        self._ranks.on_leader(compare)
        return outcomes

    def compare_answers(self, greedy: Sequence[Answer], sampled: Sequence[Answer]) -> Sequence[Gate]:
        """See `TrainEngine`. Collective."""
        logprobs = self.answer_logprobs(sampled)
        outcomes: list[Gate] = []

        async def compare() -> None:
            assert self._hf is not None
            outcomes.append(await asyncio.to_thread(comparison.greedy_gate, self._hf, greedy, self._limits))
            outcomes.append(comparison.replica_gate(logprobs, sampled, self._limits))
            self._hf = None

        self._ranks.on_leader(compare)
        return outcomes

    @torch.no_grad()
    def answer_logprobs(self, answers: Sequence[Answer], temperature: float | None = None) -> torch.Tensor:
        """The actor's log-probabilities of the responses' tokens, fp32 [k], answer by answer. Collective.

        Args:
            temperature: None: the sampling temperature.
        """
        self._policy.use()
        ids, targets = (torch.from_numpy(part).to(self._device.torch) for part in stack(answers))
        rows = max(1, self._config.trainer.micro_batch_tokens // ids.shape[1])
        forward = partial(self._policy.logprobs, temperature=temperature or self._config.rollout.temperature)
        return torch.cat(
            [
                on_every_stage(self._policy, part, partial(forward, part, wanted), (int((wanted != IGNORE).sum()),))
                for part, wanted in zip(ids.split(rows), targets.split(rows), strict=True)
            ]
        )


@torch.no_grad()
def outputs(model: Policy | Critic, ids: torch.Tensor) -> torch.Tensor:
    """The logits of a policy, fp32 [b, s, vocab], or the values of a critic, fp32 [b, s], of int64 ids [b, s]. Collective."""
    model.use()
    if isinstance(model, Policy):
        return model.logits(ids)
    return on_every_stage(model, ids, lambda: model.values(ids), tuple(ids.shape))
