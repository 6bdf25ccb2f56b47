"""Optimizer steps on a Qwen2 with random weights: the learner's, and the same in a plain torch loop.

Every token is trained on and no sequence is padded, so neither side can skip work. A step takes ids [b, s + 1] and advantages [b, 1].
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from polyreme.config.recipes.presets import resolve
from polyreme.config.trainer import ParallelConfig, Recompute
from polyreme_trainer.algorithms.algorithm import Algorithm
from polyreme_trainer.algorithms.batch import Advantages, TokenBatch
from polyreme_trainer.algorithms.state import AlgorithmState
from polyreme_trainer.megatron.batches.batch import MicroBatch, Sequences
from polyreme_trainer.megatron.device import Device
from polyreme_trainer.megatron.huggingface.families import load_architecture
from polyreme_trainer.megatron.models.build import init_parallel
from polyreme_trainer.megatron.models.policy import Policy
from polyreme_trainer.megatron.parallel.shard import data_shard
from polyreme_trainer.megatron.training.iteration import Iteration
from polyreme_trainer.megatron.training.losses import IterationLosses, over_ranks
from polyreme_trainer.megatron.training.optimizer import Adam
from polyreme_trainer.megatron.training.roles import LossTerm, Role

LR = 1e-4
MICRO_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Shape:
    """A model's sizes. `heads`: of the queries, and of the keys. `window`: the tokens to which a query attends; None: all before it."""

    vocab: int
    hidden: int
    ffn: int
    layers: int
    heads: tuple[int, int]
    positions: int = 512
    window: int | None = None


class Step(Protocol):
    def __call__(self, ids: Tensor, advantages: Tensor) -> None: ...


def save_model(shape: Shape, path: Path) -> None:
    """Saves the model with random weights and tied embeddings."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads[0],
        num_key_value_heads=shape.heads[1],
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        use_sliding_window=shape.window is not None,
        sliding_window=shape.window,
        max_window_layers=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)


def batch_of(vocab: int, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Random ids [rows, width + 1] and advantages [rows, 1]."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocab, (rows, width + 1), generator=generator)
    return ids, torch.randn(rows, 1, generator=generator)


def plain_step(path: Path, threads: int) -> Step:
    """With transformers' model, whose attention is torch's `scaled_dot_product_attention`, and torch's AdamW in its default settings."""
    torch.set_num_threads(threads)
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(ids: Tensor, advantages: Tensor) -> None:
        optimizer.zero_grad()
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        logprobs = torch.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        (-(torch.exp(logprobs - logprobs.detach()) * advantages).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def learner_step(path: Path, threads: int, parallel: ParallelConfig | None = None, recompute: Recompute | None = None) -> Step:
    """With the trainer's model (tensor parallel 1), gradient buffers, clipping and AdamW."""
    device = Device("cpu", threads=threads)
    init_parallel(parallel or ParallelConfig(), device)
    policy = Policy(load_architecture(path), "float32", device, trainable=True, recompute=recompute)
    policy.load_hf(path)
    shard = data_shard(MICRO_BATCH_TOKENS, device)

    def forward(batch: MicroBatch) -> Tensor:
        return policy.logprobs(batch.ids, batch.targets, 1.0)

    actor = Role("actor", policy, forward, shard)
    actor.make_optimizer(Adam())

    def step(ids: Tensor, advantages: Tensor) -> None:
        count, width = ids.shape
        ones, every = np.ones(count * (width - 1), dtype=np.float32), np.arange(count)
        tokens = TokenBatch(
            offsets=np.arange(count + 1) * (width - 1),
            mask=ones,
            behaviour=-ones,
            version=np.zeros(len(ones), dtype=np.int32),
            group=every,
            score=np.zeros(count),
            truncated=np.zeros(count, dtype=bool),
            greedy=np.zeros(count, dtype=bool),
        )
        algorithm = Algorithm(resolve("grpo", {"kl": None, "aggregation": "token-mean"}), longest=width - 1)
        sequences = Sequences(list(ids.numpy()), ones)
        per_token = Advantages(np.repeat(advantages[:, 0].numpy(), width - 1), None, ones)
        iteration = Iteration(1, sequences, tokens, [every], AlgorithmState(), lr=LR)
        loss = IterationLosses(iteration, algorithm, tokens, per_token).policy(every)
        metrics = actor.forward_backward(LossTerm(sequences, every, loss))
        actor.optim_step(iteration.lr)
        over_ranks(shard, metrics)

    return step
