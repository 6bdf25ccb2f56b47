"""A policy: a sharded language model and the log-probabilities of tokens under it.

Invariant: at most `CHUNK_LOGITS` logits exist at a time on a rank while log-probabilities are computed, except for a single row.
"""

from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyreme.config.run import RunConfig
from polyreme_trainer.megatron import hf_mapping
from polyreme_trainer.megatron.batch import IGNORE
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.families import load_architecture
from polyreme_trainer.megatron.logprobs import token_logprobs
from polyreme_trainer.megatron.mcore import parallel_state
from polyreme_trainer.megatron.model import ShardedModel
from polyreme_trainer.megatron.pipeline import on_every_stage

CHUNK_LOGITS = 2**26
"""The largest number of logits that exist at a time on a rank; 256 MiB in fp32. A longer micro-batch computes its logits in chunks, and again
in the backward pass."""


class Policy(ShardedModel):
    """A sharded model with a language-model head."""

    @overload
    def logprobs(
        self, ids: Tensor, targets: Tensor, temperature: float = ..., *, with_entropy: Literal[False] = ...
    ) -> Tensor: ...
    @overload
    def logprobs(
        self, ids: Tensor, targets: Tensor, temperature: float = ..., *, with_entropy: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...
    def logprobs(
        self, ids: Tensor, targets: Tensor, temperature: float = 1.0, *, with_entropy: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Log-probabilities of `targets[b, t]` after `ids[b, : t + 1]`, differentiable in the weights: fp32 [k], in nats.

        Args:
            ids: int64 [b, s], padded on the right with any token of the vocabulary.
            targets: int64 [b, s]; positions with IGNORE are skipped. The k others are in row-major order.
            temperature: the divisor of the logits, as in sampling.
            with_entropy: also return the entropy of each target's distribution, fp32 [k], differentiable.
        """
        flat = targets.reshape(-1)
        wanted = (flat != IGNORE).nonzero().squeeze(1)
        hidden = self.hidden(ids).index_select(0, wanted)

        def compute(hidden: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            start, valid = self._columns
            group = parallel_state.get_tensor_model_parallel_group() if self.rank.tp > 1 else None
            return token_logprobs(
                self._logits(hidden),
                targets,
                start=start,
                valid=valid,
                temperature=temperature,
                group=group,
                with_entropy=with_entropy,
            )

        rows = max(1, CHUNK_LOGITS // self._padded_columns)
        results = _in_chunks(compute, hidden, flat[wanted], rows)
        return (results[0], results[1]) if with_entropy else results[0]

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """All logits, on every rank: fp32 [b, s, vocab]. Used to compare models, not for training. Collective."""
        return on_every_stage(self, ids, lambda: self._all_logits(ids), (*ids.shape, self.arch.vocab))

    def _all_logits(self, ids: Tensor) -> Tensor:
        """The last stage's logits, gathered over its tensor ranks."""
        local = self._logits(self.hidden(ids)).float()
        if self.rank.tp > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            parts = [torch.empty_like(local) for _ in range(self.rank.tp)]
            torch.distributed.all_gather(parts, local.contiguous(), group=group)
            local = torch.cat(parts, dim=-1)
        return local[:, : self.arch.vocab].reshape(*ids.shape, -1)

    @property
    def _padded_columns(self) -> int:
        """The number of columns of this rank's logits, including padding."""
        return hf_mapping.padded_vocab(self.arch, self.rank.tp) // self.rank.tp

    @property
    def _columns(self) -> tuple[int, int]:
        """The vocabulary index of this rank's first column, and the number of its columns that are not padding."""
        start = self.rank.tp_rank * self._padded_columns
        return start, max(0, min(self._padded_columns, self.arch.vocab - start))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, this rank's columns]."""
        tied = self.arch.head == "tied"
        weight = self.module.shared_embedding_or_output_weight() if tied else self.module.output_layer.weight
        return self.spec.linear(hidden, weight, None, parallel_state.get_tensor_model_parallel_group(), self.rank.tp > 1)


def _in_chunks(
    compute: Callable[[Tensor, Tensor], tuple[Tensor, ...]], hidden: Tensor, targets: Tensor, rows: int
) -> tuple[Tensor, ...]:
    """Runs `compute` on at most `rows` rows at a time. With several chunks, each is computed again in its backward pass."""
    if len(targets) <= rows:
        return compute(hidden, targets)
    parts = [
        checkpoint(compute, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def build_policy(config: RunConfig, device: Device, *, trainable: bool = True) -> Policy:
    """The run's model with the weights of its Hugging Face directory. Requires `init_parallel`. Raises ConfigError."""
    policy = Policy(load_architecture(config.model.path), config.model.dtype, device, trainable=trainable)
    policy.load_hf(config.model.path)
    return policy
