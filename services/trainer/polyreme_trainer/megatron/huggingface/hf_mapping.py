"""The mapping between megatron-core's parameters and Hugging Face tensors, for any tensor, pipeline and expert rank.

Loading, export and weight sync use it in either direction: for every slice, `hf[hf_index]` and `param[param_index]` are equal.

Invariant: over all ranks, primary slices cover every Hugging Face tensor exactly once. The module is pure and imports no torch.

How megatron-core stores tensors that Hugging Face keeps separate (rows are output features):
- `linear_qkv`: for each key-value group its query heads, then its key head, then its value head. The rows of all groups are split
  into `tp` equal runs. With more ranks than groups, a run may start and end inside a group.
- `linear_fc1`: on each rank, the rank's gate rows, then its up rows.
- Embedding and output rows are padded with rows that no token uses, so that they divide evenly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from polyreme_trainer.megatron.huggingface.families.base import (
    EMBEDDING,
    EMBEDDING_ROW,
    EXPERT,
    EXPERT_BIAS,
    FINAL_NORM_ROW,
    LM_HEAD,
    Architecture,
    MappingRow,
    Shape,
)

VOCAB_MULTIPLE = 16  # rows per rank, so that the matrix products of the output layer stay aligned

Index = tuple[slice, ...]


@dataclass(frozen=True)
class Slice:
    """`param[param_index]` of one rank is `hf[hf_index]` of the whole model.

    `primary` is False for a copy whose original another rank writes: a replicated parameter on tensor or expert ranks after the
    first, and the output layer's copy of a tied embedding on the last pipeline stage.
    """

    param: str
    hf_name: str
    param_index: Index
    hf_index: Index
    primary: bool = True


@dataclass(frozen=True)
class Rank:
    """A rank's coordinates in the mesh of tensor, pipeline and expert ranks.

    Args:
        vocab_multiple: rows of the embedding on each tensor rank are a multiple of this.
        etp_rank, etp: the coordinate among the ranks that cut each expert, and their number if it is not `tp`; 0: the tensor
            ranks cut experts like all other matrices.
        vpp: the number of virtual stages per pipeline stage. The first virtual stages of all pipeline stages have the model's
            first layers, the second have the next, and so on. A rank's layer numbers continue from one virtual stage to the next.
    """

    tp_rank: int = 0
    tp: int = 1
    pp_rank: int = 0
    pp: int = 1
    ep_rank: int = 0
    ep: int = 1
    vocab_multiple: int = VOCAB_MULTIPLE
    vpp: int = 1
    etp_rank: int = 0
    etp: int = 0

    @property
    def expert_cut(self) -> "Rank":
        """The same rank, with its coordinates among the ranks that cut each expert as tensor coordinates."""
        return replace(self, tp_rank=self.etp_rank, tp=self.etp) if self.etp else self

    @property
    def expert_places(self) -> int:
        """The number of ranks that together have all experts of a stage."""
        return self.ep * self.expert_cut.tp

    @property
    def places(self) -> int:
        """The number of ranks that together hold a stage: the first of its ranks. Later ranks have copies of their parts."""
        return max(self.tp, self.expert_places)

    @property
    def place(self) -> int:
        """The number of the rank among them. Tensor ranks are adjacent, and so are the ranks that cut an expert. The groups with
        different experts follow each other."""
        if self.expert_places < self.tp:
            return self.tp_rank
        return self.expert_cut.tp_rank + self.expert_cut.tp * self.ep_rank

    def at(self, place: int) -> "Rank":
        """The rank of the same stage with this number; for a number from `places` on, the rank whose parts it copies."""
        etp_rank = place % self.etp if self.etp else 0
        return replace(self, tp_rank=place % self.tp, ep_rank=place // self.expert_cut.tp % self.ep, etp_rank=etp_rank)

    @property
    def micro_batch_group(self) -> int:
        """The number of micro-batches of a pass through the stages is a multiple of this: a rank with several virtual stages
        takes one micro-batch for each pipeline stage through one of them, then through the next."""
        return self.pp if self.vpp > 1 else 1


def stage_rows(arch: Architecture, rank: Rank) -> Iterator[tuple[MappingRow, bool]]:
    """Table rows of this pipeline stage and expert rank, and whether this rank, perhaps with other tensor ranks, writes each."""
    first, last = rank.pp_rank == 0, rank.pp_rank == rank.pp - 1
    leads, experts_lead = rank.place < rank.tp, rank.place < rank.expert_places
    if rank.etp and not arch.experts:
        raise ValueError(f"{arch.family.name} has no experts that {rank.etp} ranks could cut")
    if rank.ep > 1 and not arch.experts:
        raise ValueError(f"{arch.family.name} has no experts that {rank.ep} expert ranks could share")
    if arch.experts % rank.ep:
        raise ValueError(f"{arch.experts} experts do not divide over {rank.ep} expert ranks")
    if first and not arch.adapter:
        yield EMBEDDING_ROW, leads
    for local, layer in enumerate(layers_of(arch, rank)):
        for row, same in arch.layer_rows(layer, rank.ep_rank, rank.ep):
            yield row.in_layer(local, layer), leads if same else experts_lead
    if last and not arch.adapter:
        yield FINAL_NORM_ROW, leads
    if last and (arch.head == "value" if arch.adapter else not (first and arch.head == "tied")):
        yield arch.head_row(), leads and arch.head != "tied"


def layers_of(arch: Architecture, rank: Rank) -> list[int]:
    """The numbers of the rank's layers in the whole model. Raises ValueError when the layers do not divide evenly."""
    each, rest = divmod(arch.layers, rank.pp * rank.vpp)
    if rest:
        virtual = f" of {rank.vpp} virtual stages each" if rank.vpp > 1 else ""
        raise ValueError(f"{arch.layers} layers do not divide into {rank.pp} pipeline stages{virtual}")
    starts = range(rank.pp_rank * each, arch.layers, rank.pp * each)
    return [layer for start in starts for layer in range(start, start + each)]


def stage_of_tensors(arch: Architecture, rank: Rank) -> dict[str, int]:
    """The pipeline stage that writes each Hugging Face tensor."""
    # With more tensor ranks than key heads, some ranks have no key. Expert ranks have different experts.
    ranks = [replace(rank, pp_rank=stage).at(place) for stage, place in product(range(rank.pp), range(rank.places))]
    return {piece.hf_name: each.pp_rank for each in ranks for piece in rank_slices(arch, each) if piece.primary}


def is_expert(param: str) -> bool:
    """Whether a parameter belongs to an expert. Its values differ between expert ranks; those of other parameters are equal."""
    return EXPERT in param


def is_expert_bias(param: str) -> bool:
    """Whether a parameter is an expert bias: float32 whatever the model's dtype, and without a gradient."""
    return param.endswith(EXPERT_BIAS)


def rank_slices(arch: Architecture, rank: Rank) -> list[Slice]:
    """Every slice of one rank's parameters, in model order. Raises ValueError when the sizes do not divide evenly."""
    check(arch, rank.tp, rank.expert_cut.tp)
    slices = []
    for row, writes in stage_rows(arch, rank):
        cut = rank.expert_cut if is_expert(row.param) else rank
        for name, param_index, hf_index in _SHARES[row.share](arch, cut, list(arch.shapes(row).items())):
            primary = writes and (row.share != "all" or rank.tp_rank == 0)
            if name not in row.absent:
                slices.append(Slice(row.param, name, param_index, hf_index, primary))
    return slices


def check(arch: Architecture, tp: int, etp: int | None = None) -> None:
    """Raises ValueError unless the sizes divide over `tp` ranks as megatron-core requires, and those of experts over `etp`."""
    if etp is not None and arch.experts and arch.expert_ffn % etp:
        raise ValueError(f"expert ffn = {arch.expert_ffn} does not divide over {etp} ranks that cut each expert")
    if arch.family.projection_norms and arch.kv_heads % tp:  # ranks that share a key head would count it twice
        raise ValueError(f"key-value heads = {arch.kv_heads}, with a norm over all of them, do not divide over {tp} tensor ranks")
    packed = arch.queries + 2 * arch.keys
    widths = [arch.ffn]
    if arch.experts:
        widths = [*([arch.expert_ffn] if etp is None else []), arch.shared_ffn, *([arch.ffn] if arch.dense_layers else [])]
    if arch.heads % tp or any(width % tp for width in widths) or packed % tp or max(arch.kv_heads, tp) % min(arch.kv_heads, tp):
        raise ValueError(
            f"heads = {arch.heads}, key-value heads = {arch.kv_heads} and ffn = {', '.join(map(str, widths))} "
            f"do not divide over {tp} tensor ranks"
        )


def padded_vocab(arch: Architecture, tp: int, multiple: int = VOCAB_MULTIPLE) -> int:
    """The number of embedding rows over all ranks, including padding."""
    return -(-arch.vocab // (multiple * tp)) * multiple * tp


def hf_shapes(arch: Architecture) -> dict[str, Shape]:
    """Name and shape of every Hugging Face tensor, in model order, without a tied lm_head (see `hf_aliases`)."""
    return arch.hf_shapes()


def expert_biases(arch: Architecture) -> set[str]:
    """The Hugging Face tensors of the expert biases, which have their own dtype, see `is_expert_bias`."""
    return {name for row in arch.rows() if is_expert_bias(row.param) for name in row.tensors}


def hf_aliases(arch: Architecture) -> dict[str, str]:
    """Tensors that share another tensor's storage: {alias: tensor}."""
    return {LM_HEAD: EMBEDDING} if arch.head == "tied" else {}


def param_shapes(arch: Architecture, rank: Rank) -> dict[str, Shape]:
    """Name and shape of every parameter of one rank, including padding."""
    shapes: dict[str, Shape] = {}
    for row, _ in stage_rows(arch, rank):
        parts = list(arch.shapes(row).values())
        first, *rest = parts[0]
        tp = rank.expert_cut.tp if is_expert(row.param) else rank.tp
        if row.share in ("rows", "gate_up", "qkv"):
            first = sum(part[0] for part in parts) // tp
        elif row.share == "all":
            first = sum(part[0] for part in parts)
        elif row.share == "vocab":
            first = padded_vocab(arch, rank.tp, rank.vocab_multiple) // rank.tp
        elif row.share == "columns":
            rest = [rest[0] // tp]
        shapes[row.param] = (first, *rest)
    return shapes


_Part = tuple[str, Shape]
_Piece = tuple[str, Index, Index]


def _all(arch: Architecture, rank: Rank, parts: list[_Part]) -> Iterator[_Piece]:
    at = 0
    for name, shape in parts:
        yield _rows(name, shape, at, 0, shape[0])
        at += shape[0]


def _columns(arch: Architecture, rank: Rank, parts: list[_Part]) -> Iterator[_Piece]:
    ((name, (height, width)),) = parts
    n = width // rank.tp
    yield name, (slice(0, height), slice(0, n)), (slice(0, height), _cut(rank, n))


def _split_rows(arch: Architecture, rank: Rank, parts: list[_Part]) -> Iterator[_Piece]:
    at = 0
    for name, shape in parts:
        n = shape[0] // rank.tp
        yield _rows(name, shape, at, rank.tp_rank * n, n)
        at += n


def _vocab(arch: Architecture, rank: Rank, parts: list[_Part]) -> Iterator[_Piece]:
    ((name, shape),) = parts
    n = padded_vocab(arch, rank.tp, rank.vocab_multiple) // rank.tp
    start = rank.tp_rank * n
    if start < arch.vocab:
        yield _rows(name, shape, 0, start, min(n, arch.vocab - start))


def _qkv(arch: Architecture, rank: Rank, parts: list[_Part]) -> Iterator[_Piece]:
    """Yields the parts of the packed rows that are in this rank's range, run by run."""
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


_SHARES = {"all": _all, "columns": _columns, "rows": _split_rows, "gate_up": _split_rows, "vocab": _vocab, "qkv": _qkv}
