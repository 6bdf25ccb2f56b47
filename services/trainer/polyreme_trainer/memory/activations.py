"""The memory of one optimizer step on top of the models' state: saved activations, logits, and the largest temporaries.

A layer saves for its backward pass the inputs of its norms, matrix products, attention and activation. In numbers per token, with
hidden size h, widths q of the queries and k of the keys, MLP width f, over t tensor ranks: 4h + (2q + 2k + 3f) / t. Outside of
attention and MLP, sequence parallelism divides too. Attention is fused, so no [s, s] matrix is saved (Korthikanti et al. 2022,
section 4, without the score matrix). Where no kernel takes packed sequences, attention pads sequences of similar length to one
another, and saves queries, keys, values and output of the padding too, and the output without it. A sliding window w has a mask
[w, w], once for all layers, and its layers save the keys and values before each w queries as well.

Invariant: the estimate is that of a full micro-batch. For padding, the lengths of its sequences count as evenly spread.
"""

import math
from dataclasses import dataclass, replace

from polyreme.config.trainer import Recompute
from polyreme_trainer.megatron.batches.attention_blocks import spread_positions
from polyreme_trainer.megatron.huggingface.families.base import Architecture
from polyreme_trainer.megatron.huggingface.hf_mapping import layers_of, padded_vocab
from polyreme_trainer.megatron.huggingface.lora_mapping import stacked_ranks, wide_numbers
from polyreme_trainer.memory.sharding import Sharding
from polyreme_trainer.memory.state import Addend, Model

BLOCK_LOGITS = 2**24
"""The largest number of logits that exist at a time on a rank, `logprobs.BLOCK_LOGITS`."""
ACCELERATOR_LOGITS = 2**26
"""The same on an accelerator."""
_ALIGNED = 16  # columns of the smallest block
GATED_ROWS = 4096
"""The rows of a gated activation whose backward pass has temporary numbers at a time, `activation.ROWS`."""
FLOAT = 4


@dataclass(frozen=True)
class MicroBatchSize:
    """The largest micro-batch of a step.

    Attributes:
        tokens: its tokens on one rank, with padding.
        trained: the tokens whose log-probabilities are computed.
        entropy: whether the loss has an entropy.
        on_cpu: whether logits come in smaller blocks.
        recompute: the activations that the backward pass computes again.
        padded: the tokens of the longest sequence, where attention pads; 0 where it does not.
    """

    tokens: int
    trained: int
    entropy: bool = False
    on_cpu: bool = True
    recompute: Recompute | None = None
    padded: int = 0


def step_terms(model: Model, sharding: Sharding, batch: MicroBatchSize) -> list[Addend]:
    """The additional memory of the trained model during one micro-batch: saved activations, then the temporaries of its peak."""
    arch, width = model.arch, model.width
    layers = sharding.layers(arch)
    inner = width * stacked_ranks(model.adapter) if model.adapter is not None and batch.recompute != "full" else 0
    kinds = [(count, saved_bytes(kind, sharding, width, batch) + inner) for count, kind in _kinds(arch, sharding)]
    in_flight = f" x {sharding.micro_batches} micro-batches" if sharding.micro_batches > 1 else ""
    every = " and ".join(f"{count:g} layers x {each:,} bytes" for count, each in kinds)
    saved = Addend(
        f"{model.role} activations",
        math.ceil(batch.tokens * sum(count * each for count, each in kinds) * sharding.micro_batches),
        f"{batch.tokens:,} tokens x {every}{in_flight}",
    )
    wide = [*_wide_adapters(model, sharding, batch), *_padding(model, sharding, batch, layers)]
    moments = [[saved, peak, *wide] for peak in _peaks(model, sharding, batch)]
    if sharding.first and model.adapter is None:  # the last gradient of a step, computed when no layer's activations remain
        moments.append([_embedding_gradient(model, sharding)])
    return max(moments, key=lambda terms: sum(term.nbytes for term in terms))


def _kinds(arch: Architecture, sharding: Sharding) -> list[tuple[float, Architecture]]:
    """The layers of one virtual stage, on average over the rank's: the number of each kind, and a model of only this kind."""
    every = layers_of(arch, sharding.rank)
    dense = sum(not arch.has_experts(layer) for layer in every) if arch.experts else 0
    kinds = [(len(every) - dense, arch), (dense, replace(arch, experts=0, top_k=0))]
    return [(count / sharding.rank.vpp, kind) for count, kind in kinds if count]


def layer_bytes(arch: Architecture, sharding: Sharding, width: int) -> int:
    """Bytes that one layer saves for each token. With experts: that of a layer that has them, for evenly routed tokens."""
    tensor, sequence = sharding.rank.tp, sharding.sequence_ranks
    hidden = arch.hidden * (6 if arch.family.post_norms else 4)  # two inputs and two outputs of norms
    heads = 2 * arch.queries + 2 * arch.keys  # rotated q and k; v; the attention's output
    if sharding.context_ranks > 1:
        # Rotated q, the output, and the keys and values that the early and the late pieces see, on all ranks.
        heads = 2 * arch.queries + (2 * sharding.context_ranks + 1) * arch.keys
    if arch.family.options.get("qk_layernorm") or arch.family.projection_norms:
        heads += arch.queries + arch.keys
    mlp = 3 * (arch.shared_ffn if arch.experts else arch.ffn)
    routed = _routed(arch, sharding)
    statistics = FLOAT * (arch.heads // tensor + 2 + 6 * arch.experts)
    return width * (hidden // sequence + (heads + mlp) // tensor + routed) + statistics


def saved_bytes(arch: Architecture, sharding: Sharding, width: int, batch: MicroBatchSize) -> int:
    """Bytes that one layer keeps for each token until its backward pass, which computes the rest of `layer_bytes` again."""
    if batch.recompute == "full":
        return width * arch.hidden // sharding.sequence_ranks
    every = layer_bytes(arch, sharding, width)
    if batch.recompute is None:
        return every
    mlp = arch.shared_ffn if arch.experts else arch.ffn
    return every - width * (3 * mlp // sharding.rank.tp + _routed(arch, sharding))


def _routed(arch: Architecture, sharding: Sharding) -> int:
    """Numbers that a layer's experts save for each token. The ranks that cut an expert each have all of its tokens."""
    tensor, cut = sharding.rank.tp, sharding.rank.expert_cut.tp
    return arch.top_k * (arch.hidden * cut + 4 * arch.expert_ffn) // tensor


def _peaks(model: Model, sharding: Sharding, batch: MicroBatchSize) -> list[Addend]:
    """The temporaries that exist while all saved activations do."""
    arch, width, tensor = model.arch, model.width, sharding.rank.tp
    kinds = [kind for _, kind in _kinds(arch, sharding)]
    mlp = max(kind.shared_ffn + kind.top_k * kind.expert_ffn if kind.experts else kind.ffn for kind in kinds)
    rows = min(batch.tokens, GATED_ROWS)  # of two temporaries
    backward = width * (batch.tokens * (2 * arch.hidden + 3 * mlp // tensor) + rows * 2 * mlp // tensor)
    # The output layer's gradient stays until the embedding's is added.
    tied = _table(model, sharding) if arch.head == "tied" else 0
    again = batch.tokens * max(layer_bytes(kind, sharding, width) - saved_bytes(kind, sharding, width, batch) for kind in kinds)
    gradients = f"gradients of one layer{' and its recomputed activations' if again else ''} at {batch.tokens:,} tokens"
    found = [Addend(f"{model.role} backward", backward + tied + again, gradients)]
    if sharding.last and arch.head == "value":
        states = 2 * batch.tokens * arch.hidden * width
        found.append(Addend(f"{model.role} output", states, f"{batch.tokens:,} tokens x {2 * arch.hidden} x {width} bytes"))
    elif sharding.last:
        found.append(_logits(model, sharding, batch))
    return found


def _wide_adapters(model: Model, sharding: Sharding, batch: MicroBatchSize) -> list[Addend]:
    """The B of fused layers as matrices, which each micro-batch saves for its backward pass; empty without such layers."""
    numbers = 0 if model.adapter is None else wide_numbers(model.adapter) // sharding.rank.tp
    if not numbers or batch.recompute == "full":
        return []
    layers = sharding.layers(model.arch)
    in_flight = f" x {sharding.micro_batches} micro-batches" if sharding.micro_batches > 1 else ""
    arithmetic = f"{numbers:,} numbers x {layers} layers x {model.width} bytes{in_flight}"
    return [Addend(f"{model.role} B of fused layers", numbers * layers * model.width * sharding.micro_batches, arithmetic)]


def _padding(model: Model, sharding: Sharding, batch: MicroBatchSize, layers: int) -> list[Addend]:
    """The activations that attention saves for padding and for a window. Empty where attention does not pad."""
    if not batch.padded:
        return []
    arch, terms = model.arch, list[Addend]()
    positions, tokens = spread_positions(batch.tokens, batch.padded, arch.queries // sharding.rank.tp)
    if extra := positions - tokens:
        output = model.width * arch.queries // sharding.rank.tp
        each = 2 * output + model.width * 2 * arch.keys // sharding.rank.tp
        kept = 1 if batch.recompute == "full" else layers * sharding.micro_batches
        spread = f"for lengths spread from 1 to {batch.padded:,}"
        arithmetic = f"({extra:,} positions x {each:,} bytes + {tokens:,} tokens x {output:,}) x {kept} layers, {spread}"
        terms.append(Addend(f"{model.role} attention padding", (extra * each + tokens * output) * kept, arithmetic))
    if arch.window is not None and batch.padded > arch.window:
        mask, each = arch.window**2 * (model.width + 1), model.width * 2 * arch.keys // sharding.rank.tp
        sliding = sum(arch.sliding[layer] for layer in layers_of(arch, sharding.rank))
        kept = 1 if batch.recompute == "full" else sliding * sharding.micro_batches
        arithmetic = (
            f"{arch.window:,} x {arch.window:,} x ({model.width} + 1) bytes + "
            f"{batch.tokens:,} tokens x {kept} layers x {each:,} bytes"
        )
        terms.append(Addend(f"{model.role} attention window", mask + batch.tokens * kept * each, arithmetic))
    return terms


def _table(model: Model, sharding: Sharding) -> int:
    """Bytes of the gradient of one rank's part of the embedding, or the output layer; 0 with adapters, since both are frozen."""
    if model.adapter is not None:
        return 0
    return padded_vocab(model.arch, sharding.rank.tp) // sharding.rank.tp * model.arch.hidden * model.width


def _embedding_gradient(model: Model, sharding: Sharding) -> Addend:
    uses = 2 if model.arch.head == "tied" else 1
    table = _table(model, sharding)
    return Addend(
        f"{model.role} embedding gradient", uses * table, f"{table:,} bytes" + (" x 2, of both uses" if uses > 1 else "")
    )


def _logits(model: Model, sharding: Sharding, batch: MicroBatchSize) -> Addend:
    """A block of logits and its gradient, together with the output layer's gradient and the final hidden states."""
    width, hidden, table = model.width, model.arch.hidden, _table(model, sharding)
    vocab = padded_vocab(model.arch, sharding.rank.tp)
    columns = vocab // sharding.rank.tp
    most = BLOCK_LOGITS if batch.on_cpu else ACCELERATOR_LOGITS
    several = batch.trained * columns > most
    block = min(columns, max(_ALIGNED, most // batch.trained // _ALIGNED * _ALIGNED)) if several else columns
    # Of each logit: itself, its log-probability or its gradient, and the gradient's copy in the model's dtype.
    logit = FLOAT * (2 + batch.entropy) + (width if width < FLOAT else 0)
    if vocab != model.arch.vocab:
        logit += FLOAT  # the gradient is copied to add the padding's
    logits, states = batch.trained * block * logit, (batch.tokens + batch.trained) * hidden * width
    of_weights = block * width if model.adapter is None else 0
    parts = (of_weights + batch.trained * FLOAT) * hidden if several else 0  # a block's gradients of weights and hidden states
    arithmetic = (
        f"{batch.trained:,} tokens x {block:,} columns x {logit} bytes, "
        f"gradients of {table + parts:,}, final hidden states {states:,}"
    )
    return Addend(f"{model.role} logits", logits + table + parts + states, arithmetic)
