"""The one table between megatron-core parameters and Hugging Face tensors, for any tensor- and pipeline-parallel rank.

Loading, export and weight sync all read it, in either direction: for every slice, `hf[hf_index]` and `param[param_index]` hold the same
numbers. Over all ranks the primary slices cover every element of every Hugging Face tensor exactly once. Pure: no torch.

How megatron stores what Hugging Face keeps apart (rows are output features):
- `linear_qkv`: per key-value group the group's query heads, then its key head, then its value head; all groups in turn, cut into `tp`
  equal runs of rows. With more ranks than groups a run may start and end inside a group.
- `linear_fc1`: on each rank the rank's gate rows, then its up rows.
- embedding and output rows are padded with rows that no token uses, so that they divide evenly.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from polyreme_trainer.megatron.families.base import Architecture

VOCAB_MULTIPLE = 16  # rows per rank, so that the matrix products of the output layer stay aligned

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

Index = tuple[slice, ...]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """`param[param_index]` of one rank is `hf[hf_index]` of the whole model.

    `primary` is false for a copy that another rank writes: a replicated parameter on tensor ranks after the first, and the output
    layer's copy of a tied embedding on the last pipeline stage.
    """

    param: str
    hf_name: str
    param_index: Index
    hf_index: Index
    primary: bool = True


@dataclass(frozen=True)
class Rank:
    """Where a rank stands in the model-parallel grid."""

    tp_rank: int = 0
    tp: int = 1
    pp_rank: int = 0
    pp: int = 1


@dataclass(frozen=True)
class Row:
    """One line of the table: a parameter, the Hugging Face tensors that make it up, and how `tp` ranks share it.

    share: "all" (every rank has the whole), "rows" (dimension 0 cut evenly), "columns" (dimension 1 cut evenly), "vocab" (rows, padded),
    "gate_up" (rows of each part cut evenly, parts stacked on each rank), "qkv" (as in the module's text).
    """

    param: str
    hf: tuple[str, ...]
    share: str


_LAYER = (
    Row("input_layernorm.weight", ("input_layernorm.weight",), "all"),
    Row("self_attention.linear_qkv.weight", tuple(f"self_attn.{p}_proj.weight" for p in "qkv"), "qkv"),
    Row("self_attention.linear_qkv.bias", tuple(f"self_attn.{p}_proj.bias" for p in "qkv"), "qkv"),
    Row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), "columns"),
    Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), "all"),
    Row("mlp.linear_fc1.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gate_up"),
    Row("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), "columns"),
)


def rows(arch: Architecture, rank: Rank) -> Iterator[tuple[Row, bool]]:
    """The table's lines that live on this pipeline stage, layer numbers filled in; whether the stage is the one that writes them."""
    first, last = rank.pp_rank == 0, rank.pp_rank == rank.pp - 1
    if first:
        yield Row("embedding.word_embeddings.weight", (EMBEDDING,), "vocab"), True
    per_stage, rest = divmod(arch.layers, rank.pp)
    if rest:
        raise ValueError(f"{arch.layers} layers do not divide into {rank.pp} pipeline stages")
    for local in range(per_stage):
        layer = rank.pp_rank * per_stage + local
        for row in _LAYER:
            if arch.qkv_bias or not row.param.endswith(".bias"):
                names = tuple(f"model.layers.{layer}.{name}" for name in row.hf)
                yield Row(f"decoder.layers.{local}.{row.param}", names, row.share), True
    if last:
        yield Row("decoder.final_layernorm.weight", ("model.norm.weight",), "all"), True
        if not arch.tied:
            yield Row("output_layer.weight", (LM_HEAD,), "vocab"), True
        elif not first:
            yield Row("output_layer.weight", (EMBEDDING,), "vocab"), False


def rank_slices(arch: Architecture, rank: Rank) -> list[Slice]:
    """Every slice of one rank's parameters, in the order of the model. Raises ValueError when the sizes do not divide."""
    check(arch, rank.tp)
    shapes = hf_shapes(arch)
    slices = []
    for row, writes in rows(arch, rank):
        parts = [(name, shapes[name]) for name in row.hf]
        for name, param_index, hf_index in _SHARES[row.share](arch, rank, parts):
            primary = writes and (row.share != "all" or rank.tp_rank == 0)
            slices.append(Slice(row.param, name, param_index, hf_index, primary))
    return slices


def check(arch: Architecture, tp: int) -> None:
    """Raises ValueError unless the architecture's sizes divide over `tp` ranks as megatron-core needs."""
    packed = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
    if arch.heads % tp or arch.ffn % tp or packed % tp or max(arch.kv_heads, tp) % min(arch.kv_heads, tp):
        raise ValueError(
            f"heads = {arch.heads}, key-value heads = {arch.kv_heads} and ffn = {arch.ffn} do not divide over {tp} tensor ranks"
        )


def padded_vocab(arch: Architecture, tp: int) -> int:
    """Rows of the embedding over all ranks, padding included."""
    return -(-arch.vocab // (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE * tp


def hf_shapes(arch: Architecture) -> dict[str, Shape]:
    """Name and shape of every Hugging Face tensor, in the order of the model; a tied lm_head is absent (see `hf_aliases`)."""
    hidden, queries, keys = arch.hidden, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    layer: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.q_proj.bias": (queries,),
        "self_attn.k_proj.bias": (keys,),
        "self_attn.v_proj.bias": (keys,),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (arch.ffn, hidden),
        "mlp.up_proj.weight": (arch.ffn, hidden),
        "mlp.down_proj.weight": (hidden, arch.ffn),
    }
    shapes: dict[str, Shape] = {EMBEDDING: (arch.vocab, hidden)}
    for number in range(arch.layers):
        for name, shape in layer.items():
            if arch.qkv_bias or not name.endswith(".bias"):
                shapes[f"model.layers.{number}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not arch.tied:
        shapes[LM_HEAD] = (arch.vocab, hidden)
    return shapes


def hf_aliases(arch: Architecture) -> dict[str, str]:
    """Tensors that are another one's storage: {alias: tensor}."""
    return {LM_HEAD: EMBEDDING} if arch.tied else {}


def param_shapes(arch: Architecture, rank: Rank) -> dict[str, Shape]:
    """Name and shape of every parameter of one rank, padding included."""
    shapes: dict[str, Shape] = {}
    hf = hf_shapes(arch)
    for row, _ in rows(arch, rank):
        first, *rest = hf[row.hf[0]]
        if row.share in ("gate_up", "qkv"):
            first = sum(hf[name][0] for name in row.hf) // rank.tp
        elif row.share == "vocab":
            first = padded_vocab(arch, rank.tp) // rank.tp
        elif row.share == "columns":
            rest = [rest[0] // rank.tp]
        shapes[row.param] = (first, *rest)
    return shapes


_Part = tuple[str, Shape]
_Piece = tuple[str, Index, Index]


def _all(arch: Architecture, rank: Rank, parts: list[_Part]) -> Iterator[_Piece]:
    ((name, shape),) = parts
    whole = tuple(slice(0, n) for n in shape)
    yield name, whole, whole


def _columns(arch: Architecture, rank: Rank, parts: list[_Part]) -> Iterator[_Piece]:
    ((name, (height, width)),) = parts
    n = width // rank.tp
    yield name, (slice(0, height), slice(0, n)), (slice(0, height), _cut(rank, n))


def _gate_up(arch: Architecture, rank: Rank, parts: list[_Part]) -> Iterator[_Piece]:
    at = 0
    for name, shape in parts:
        n = shape[0] // rank.tp
        yield _rows(name, shape, at, rank.tp_rank * n, n)
        at += n


def _vocab(arch: Architecture, rank: Rank, parts: list[_Part]) -> Iterator[_Piece]:
    ((name, shape),) = parts
    n = padded_vocab(arch, rank.tp) // rank.tp
    start = rank.tp_rank * n
    if start < arch.vocab:
        yield _rows(name, shape, 0, start, min(n, arch.vocab - start))


def _qkv(arch: Architecture, rank: Rank, parts: list[_Part]) -> Iterator[_Piece]:
    """Walks the packed rows run by run and keeps what falls into this rank's range."""
    n = sum(shape[0] for _, shape in parts) // rank.tp
    low, high = rank.tp_rank * n, (rank.tp_rank + 1) * n
    at = 0
    for group in range(arch.kv_heads):
        for name, shape in parts:
            run = shape[0] // arch.kv_heads
            start, stop = max(at, low), min(at + run, high)
            if start < stop:
                yield _rows(name, shape, start - low, group * run + start - at, stop - start)
            at += run


def _rows(name: str, shape: Shape, param_start: int, hf_start: int, n: int) -> _Piece:
    rest = tuple(slice(0, width) for width in shape[1:])
    return name, (slice(param_start, param_start + n), *rest), (slice(hf_start, hf_start + n), *rest)


def _cut(rank: Rank, n: int) -> slice:
    return slice(rank.tp_rank * n, (rank.tp_rank + 1) * n)


_SHARES = {"all": _all, "columns": _columns, "gate_up": _gate_up, "vocab": _vocab, "qkv": _qkv}
