"""The memory of one optimizer step on top of the models' state: saved activations, logits, and the largest temporaries.

A layer saves for its backward pass the inputs of its norms, matrix products, attention and activation. In numbers per token, with hidden
size h, widths q of the queries and k of the keys, MLP width f, over t tensor ranks: 4h + (3q + 3k + 4f) / t. Outside of attention and MLP,
sequence parallelism divides too. Attention is fused, so no [s, s] matrix is saved (Korthikanti et al. 2022, section 4, without the score
matrix).

Invariant: the estimate is that of a full micro-batch, so a step never needs more.
"""

from dataclasses import dataclass

from polyreme_trainer.megatron.families.base import Architecture
from polyreme_trainer.megatron.hf_mapping import padded_vocab
from polyreme_trainer.megatron.memory.sharding import Sharding
from polyreme_trainer.megatron.memory.state import Addend, Model

BLOCK_LOGITS = 2**24
"""The largest number of logits that exist at a time on a rank, `logprobs.BLOCK_LOGITS`."""
_ALIGNED = 16  # columns of the smallest block
FLOAT = 4


@dataclass(frozen=True)
class MicroBatchSize:
    """The largest micro-batch of a step.

    Attributes:
        tokens: its tokens, with padding.
        trained: the tokens whose log-probabilities are computed.
        entropy: whether the loss has an entropy.
        fused: whether gate and product of an MLP are one operation, as on CPU.
    """

    tokens: int
    trained: int
    entropy: bool = False
    fused: bool = True


def step_terms(model: Model, sharding: Sharding, batch: MicroBatchSize) -> list[Addend]:
    """What the trained model adds while it trains one micro-batch: saved activations, then what its peak needs beside them."""
    arch, width = model.arch, model.width
    layers = arch.layers // sharding.rank.pp
    each = layer_bytes(arch, sharding, width, batch.fused)
    in_flight = f" x {sharding.micro_batches} micro-batches" if sharding.micro_batches > 1 else ""
    saved = batch.tokens * each * layers * sharding.micro_batches
    terms = [
        Addend(
            f"{model.role} activations",
            saved,
            f"{batch.tokens:,} tokens x {layers} layers x {each:,} bytes{in_flight}",
        )
    ]
    name, beside, arithmetic = max(_peaks(model, sharding, batch), key=lambda peak: peak[1])
    terms.append(Addend(f"{model.role} {name}", beside, arithmetic))
    return terms


def layer_bytes(arch: Architecture, sharding: Sharding, width: int, fused: bool) -> int:
    """Bytes that one layer saves for each token. With experts: for evenly routed tokens."""
    tensor, sequence = sharding.rank.tp, sharding.sequence_ranks
    hidden = arch.hidden * (6 if arch.family.post_norms else 4)  # two inputs and two outputs of norms
    heads = 3 * arch.queries + 3 * arch.keys  # packed q, k, v; rotated q and k; the attention's output
    if arch.family.options.get("qk_layernorm"):
        heads += arch.queries + arch.keys
    mlp = (4 if fused else 5) * (arch.shared_ffn if arch.experts else arch.ffn)
    routed = arch.top_k * (arch.hidden + (5 if fused else 6) * arch.expert_ffn // tensor)
    statistics = FLOAT * (arch.heads // tensor + 2 + 6 * arch.experts)
    return width * (hidden // sequence + (heads + mlp) // tensor + routed) + statistics


def _peaks(model: Model, sharding: Sharding, batch: MicroBatchSize) -> list[tuple[str, int, str]]:
    """The moments at which a step may need most, each with its bytes beside the saved activations of the layers."""
    arch, width, tensor = model.arch, model.width, sharding.rank.tp
    mlp = arch.ffn if not arch.experts else arch.shared_ffn + arch.top_k * arch.expert_ffn
    backward = batch.tokens * width * (2 * arch.hidden + 5 * mlp // tensor)
    table = padded_vocab(arch, tensor) // tensor * arch.hidden * width  # the embedding's gradient, or the output layer's
    tied = table if arch.head == "tied" else 0
    found = [("backward", backward + tied, f"gradients of one layer at {batch.tokens:,} tokens")]
    if sharding.first:
        found.append(("embedding gradient", table + tied, f"{table:,} bytes" + (" x 2, of both uses" if tied else "")))
    if sharding.last and arch.head == "value":
        found.append(
            ("output", 2 * batch.tokens * arch.hidden * width, f"{batch.tokens:,} tokens x {2 * arch.hidden} x {width} bytes")
        )
    elif sharding.last:
        found.append(_logits(model, sharding, batch, table))
    return found


def _logits(model: Model, sharding: Sharding, batch: MicroBatchSize, table: int) -> tuple[str, int, str]:
    """A block of logits and its gradient, beside the output layer's gradient and the final hidden states."""
    width, hidden = model.width, model.arch.hidden
    vocab = padded_vocab(model.arch, sharding.rank.tp)
    columns = vocab // sharding.rank.tp
    several = batch.trained * columns > BLOCK_LOGITS
    block = min(columns, max(_ALIGNED, BLOCK_LOGITS // batch.trained // _ALIGNED * _ALIGNED)) if several else columns
    each = FLOAT * (2 + batch.entropy) + (
        width if width < FLOAT else 0
    )  # logits, their gradient, and its copy in the model's dtype
    if vocab != model.arch.vocab:
        each += FLOAT  # the gradient is copied to add the padding's
    logits, states = batch.trained * block * each, (batch.tokens + batch.trained) * hidden * width
    parts = (block * width + batch.trained * FLOAT) * hidden if several else 0  # a block's gradients of weights and hidden states
    arithmetic = f"{batch.trained:,} tokens x {block:,} columns x {each} bytes, gradients of {table + parts:,}, final hidden states {states:,}"
    return "logits", logits + table + parts + states, arithmetic
