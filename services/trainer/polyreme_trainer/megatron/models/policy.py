"""A policy: a sharded language model and the log-probabilities of tokens under it.

Invariant: the logits of a micro-batch never exist together while log-probabilities are computed, unless they fit into one block
(`logprobs.BLOCK_LOGITS`).
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from polyreme.config.run import RunConfig
from polyreme.config.stage import StageConfig
from polyreme_trainer.megatron.batches.batch import IGNORE
from polyreme_trainer.megatron.batches.packing import PackedIds
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.layers.logprobs import Head, token_logprobs
from polyreme_trainer.megatron.mcore import parallel_state
from polyreme_trainer.megatron.models.model import ShardedModel
from polyreme_trainer.megatron.models.pipeline import on_every_stage


class Policy(ShardedModel):
    """A sharded model with a language-model head."""

    def logprobs(self, ids: Tensor | PackedIds, targets: Tensor, temperature: float = 1.0, *, runs: Sequence[int] = ()) -> Tensor:
        """Log-probabilities of each token's target after its sequence up to it, differentiable in the weights: fp32 [k], in nats.

        Args:
            ids: packed sequences, or int64 [b, s], padded on the right with any token of the vocabulary.
            targets: int64, of the shape of `ids`; positions with IGNORE are skipped. The k others are in their order.
            temperature: the divisor of the logits, as in sampling.
            runs: the number of each run's targets, k in all; the output layer's products are computed run by run. Empty: one run.
        """
        return self._outputs(ids, targets, temperature, runs, with_entropy=False)[0]

    def logprobs_and_entropies(self, ids: Tensor | PackedIds, targets: Tensor, temperature: float) -> Tensor:
        """As `logprobs`, and below them the entropy of each target's distribution, differentiable: fp32 [2, k]."""
        return torch.stack(self._outputs(ids, targets, temperature, (), with_entropy=True))

    def _outputs(
        self, ids: Tensor | PackedIds, targets: Tensor, temperature: float, runs: Sequence[int], with_entropy: bool
    ) -> tuple[Tensor, ...]:
        flat, tokens = targets.reshape(-1), PackedIds.of(ids)
        mine = self.context.take(tokens, flat, IGNORE)
        wanted = (mine != IGNORE).nonzero().squeeze(1)
        hidden = self.hidden(tokens).index_select(0, wanted)
        start, valid = self._columns
        group = parallel_state.get_tensor_model_parallel_group() if self.rank.tp > 1 else None
        head = Head(self._product, start, valid, temperature, group, with_entropy)
        results = by_run(hidden, self._head_weight, mine[wanted], head, runs)
        if self.context.ranks > 1:
            columns = [result.new_zeros(len(mine)).index_copy(0, wanted, result) for result in results]
            results = self.context.join(tokens, torch.stack(columns, dim=1))[flat != IGNORE].unbind(1)
        return results

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """All logits, on every rank: fp32 [b, s, vocab]. Used to compare models, not for training. Collective."""
        return on_every_stage(self, ids, lambda: self._all_logits(ids), (*ids.shape, self.arch.vocab))

    def _all_logits(self, ids: Tensor) -> Tensor:
        """The last stage's logits, gathered over its tensor ranks."""
        local = self.context.join(PackedIds.of(ids), self._product(self.hidden(ids), self._head_weight).float())
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

    @property
    def _head_weight(self) -> Tensor:
        """This rank's columns of the output layer, with padding: [columns, hidden]."""
        tied, last = self.arch.head == "tied", self.chunks[-1]
        return last.shared_embedding_or_output_weight() if tied else last.output_layer.weight

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight.T with the kernel of the model's spec."""
        return self.spec.linear(x, weight, None, parallel_state.get_tensor_model_parallel_group(), False)


def by_run(hidden: Tensor, weight: Tensor, targets: Tensor, head: Head, runs: Sequence[int]) -> tuple[Tensor, ...]:
    """`token_logprobs` of each run, joined."""
    if len(runs) < 2:
        return token_logprobs(hidden, weight, targets, head)
    sizes = list(runs)
    parts = [
        token_logprobs(each, weight, wanted, head)
        for each, wanted in zip(hidden.split(sizes), targets.split(sizes), strict=True)
        if len(wanted)
    ]
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def build_policy(
    path: Path,
    config: RunConfig | StageConfig,
    device: Device,
    *,
    trainable: bool = True,
    loaded: Callable[[float], None] | None = None,
) -> Policy:
    """A language model with the weights of a Hugging Face directory. Requires `init_parallel`. Raises ConfigError.

    Args:
        config: `model.dtype`, `seed`, `recompute`, `moe` and `lora` of `trainer` are used. Only a trainable policy has adapters.
        loaded: see `load_hf`.
    """
    settings = config.trainer
    policy = Policy(
        load_architecture(path),
        config.model.dtype,
        device,
        trainable=trainable,
        recompute=settings.recompute,
        lora=settings.lora if trainable else None,
        moe=settings.moe,
        seed=config.seed,
    )
    policy.load_hf(path, loaded)
    return policy
