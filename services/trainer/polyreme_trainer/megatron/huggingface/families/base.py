"""The common parts of all model families: the sizes of a decoder, the rows of the mapping table, and the definition of a family.

Invariant: an `Architecture` exists only for a model whose forward pass this package reproduces. Every other model raises an error
that names the reason before anything is allocated. The shape of every tensor follows from the rows and the sizes. The module is
pure: it imports neither torch nor transformers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.huggingface.families.rope import PARTIAL, Rope, read_rope

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
VALUE_HEAD = "score.weight"

Shape = tuple[int, ...]
Share = Literal["all", "columns", "vocab", "rows", "gate_up", "qkv"]


@dataclass(frozen=True)
class MappingRow:
    """One row of the mapping table: a parameter of megatron-core and the Hugging Face tensors that it consists of.

    Attributes:
        param: the parameter's name; for a layer's row, the name within the layer.
        share: for tensor ranks, "all" (whole on each rank; several tensors stacked), "columns" or "rows" (dimension 1 or 0 split
            evenly), "vocab" (rows, padded), "gate_up" (each tensor's rows split evenly, then stacked), "qkv" (see `hf_mapping`).
        tensors: name and dimensions of each tensor. A dimension is a number or the name of a size of `Architecture`.
        absent: names in `tensors` that the model does not have. The parameter has rows for them, which are always zero.
    """

    param: str
    share: Share
    tensors: Mapping[str, tuple[int | str, ...]]
    absent: frozenset[str] = frozenset()

    def in_layer(self, param_layer: int, hf_layer: int) -> "MappingRow":
        """The row of one layer, given the layer's number on its pipeline stage and in the whole model."""
        tensors = {f"model.layers.{hf_layer}.{name}": dims for name, dims in self.tensors.items()}
        absent = frozenset(f"model.layers.{hf_layer}.{name}" for name in self.absent)
        return MappingRow(f"decoder.layers.{param_layer}.{self.param}", self.share, tensors, absent)

    def of_expert(self, param_expert: int, hf_expert: int) -> "MappingRow":
        """The row of one expert, given the expert's number on its rank and in the whole layer."""
        tensors = {name.format(expert=hf_expert): dims for name, dims in self.tensors.items()}
        return MappingRow(self.param.format(expert=param_expert), self.share, tensors)


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder-only model. `kv_heads` divides `heads`.

    Attributes:
        head: "tied" (the output layer is the embedding), "untied" (a separate output layer) or "value" (one number per position).
        max_position: the longest sequence for which the model's results equal those of transformers.
        window: the number of tokens to which a query of a sliding layer attends, including its own.
        sliding: for each layer, whether its attention has the window; empty when no layer has it.
        sliding_rope: the rotary embedding of the sliding layers; None for that of the other layers.
        query_scale: attention scores are divided by its square root; None for head_dim.
        embedding_scale: the factor of the token embeddings.
        experts: the number of experts of each layer with experts; 0 for a dense model.
        dense_layers: in a model with experts, the number of its first layers that have an MLP of the width `ffn` instead.
        expert_ffn: the width of an expert.
        top_k: the number of experts to which a token is routed.
        shared_ffn: the width of the expert that every token passes; 0 without one.
        renormalizes: whether the weights of a token's experts are scaled to sum to 1.
        routed_scale: the factor of these weights, after that.
        aux_loss_coef: the coefficient of the load-balancing loss with which transformers trains the model.
        mtp_layers: the number of layers for multi-token prediction, which files have after the model's own layers. No model of
            this package has them, and neither have those of transformers and vLLM that sample.
        adapter: whether the table has only adapters' tensors, see `lora_mapping`. They include a value head, which is trained.
    """

    family: "ModelFamily"
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    head: Literal["tied", "untied", "value"]
    norm_eps: float
    max_position: int
    rope: Rope
    window: int | None = None
    sliding: tuple[bool, ...] = ()
    sliding_rope: Rope | None = None
    query_scale: float | None = None
    embedding_scale: float = 1.0
    experts: int = 0
    dense_layers: int = 0
    expert_ffn: int = 0
    top_k: int = 0
    shared_ffn: int = 0
    renormalizes: bool = False
    routed_scale: float = 1.0
    aux_loss_coef: float = 0.0
    mtp_layers: int = 0
    adapter: bool = False

    @property
    def queries(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The width of all key heads together; that of all value heads is the same."""
        return self.kv_heads * self.head_dim

    @property
    def expert_layers(self) -> int:
        """The number of layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, by its number in the whole model, has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def unread(self) -> tuple[str, ...]:
        """The starts of the names of tensors that files may have and that no model reads."""
        return tuple(f"model.layers.{self.layers + number}." for number in range(self.mtp_layers))

    def with_value_head(self) -> "Architecture":
        """The critic or reward model of the same sizes. Raises ConfigError where transformers has no classifier of the family."""
        if not self.family.classifier:
            raise ConfigError(
                "a model_type with a sequence classifier in transformers, for a critic or reward model",
                f"{self.family.name}, which has none",
                "Take a critic or reward model of another family, or an algorithm without a critic.",
            )
        return replace(self, head="value")

    def shapes(self, row: MappingRow) -> dict[str, Shape]:
        """The shape of each Hugging Face tensor of the row, including absent ones."""
        return {
            name: tuple(dim if isinstance(dim, int) else getattr(self, dim) for dim in dims) for name, dims in row.tensors.items()
        }

    def head_row(self) -> MappingRow:
        """The row of the output layer."""
        if self.head == "value":
            return MappingRow("output_layer.weight", "all", {VALUE_HEAD: (1, "hidden")})
        return MappingRow("output_layer.weight", "vocab", {EMBEDDING if self.head == "tied" else LM_HEAD: ("vocab", "hidden")})

    def layer_rows(self, layer: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[MappingRow, bool]]:
        """The rows of one layer on one expert rank, each with whether all expert ranks have the same row."""
        dense = self.experts > 0 and not self.has_experts(layer)
        for row in self.family.dense_layer if dense else self.family.layer:
            yield row, True
        here = 0 if dense else self.experts // ranks
        for local in range(here):
            for row in self.family.expert:
                yield row.of_expert(local, rank * here + local), False

    def rows(self) -> Iterator[MappingRow]:
        """The whole model's table, in model order. A tied head has no row, because it is the embedding."""
        if not self.adapter:
            yield EMBEDDING_ROW
        for layer in range(self.layers):
            yield from (row.in_layer(layer, layer) for row, _ in self.layer_rows(layer))
        if not self.adapter:
            yield FINAL_NORM_ROW
        if self.head == "value" or (self.head == "untied" and not self.adapter):
            yield self.head_row()

    def hf_shapes(self) -> dict[str, Shape]:
        """Name and shape of every Hugging Face tensor, in model order, without a tied lm_head."""
        return {name: shape for row in self.rows() for name, shape in self.shapes(row).items() if name not in row.absent}

    @property
    def parameters(self) -> int:
        """The number of weights; a tied embedding counts once."""
        return sum(math.prod(shape) for shape in self.hf_shapes().values())

    @property
    def active_parameters(self) -> int:
        """The number of weights that one token uses, with `top_k` of the experts."""
        return replace(self, experts=self.top_k).parameters


EXPERT = "mlp.experts.local_experts."
"""The part of an expert parameter's name before the expert's number on its rank."""
EXPERT_BIAS = "mlp.router.expert_bias"
"""The name of the expert bias within a layer: the numbers added to the scores of experts for the choice (Wang et al. 2024)."""
EMBEDDING_ROW = MappingRow("embedding.word_embeddings.weight", "vocab", {EMBEDDING: ("vocab", "hidden")})
FINAL_NORM_ROW = MappingRow("decoder.final_layernorm.weight", "all", {"model.norm.weight": ("hidden",)})

DENSE_LAYER = (
    MappingRow("input_layernorm.weight", "all", {"input_layernorm.weight": ("hidden",)}),
    MappingRow(
        "self_attention.linear_qkv.weight",
        "qkv",
        {
            "self_attn.q_proj.weight": ("queries", "hidden"),
            "self_attn.k_proj.weight": ("keys", "hidden"),
            "self_attn.v_proj.weight": ("keys", "hidden"),
        },
    ),
    MappingRow("self_attention.linear_proj.weight", "columns", {"self_attn.o_proj.weight": ("hidden", "queries")}),
    MappingRow("pre_mlp_layernorm.weight", "all", {"post_attention_layernorm.weight": ("hidden",)}),
    MappingRow(
        "mlp.linear_fc1.weight", "gate_up", {"mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.up_proj.weight": ("ffn", "hidden")}
    ),
    MappingRow("mlp.linear_fc2.weight", "columns", {"mlp.down_proj.weight": ("hidden", "ffn")}),
)
"""Llama's layer: RMS norms before attention and MLP, grouped-query attention, SwiGLU. Without biases."""

QKV_BIAS = MappingRow(
    "self_attention.linear_qkv.bias",
    "qkv",
    {"self_attn.q_proj.bias": ("queries",), "self_attn.k_proj.bias": ("keys",), "self_attn.v_proj.bias": ("keys",)},
)
ATTENTION_BIAS = (QKV_BIAS, MappingRow("self_attention.linear_proj.bias", "all", {"self_attn.o_proj.bias": ("hidden",)}))
MLP_BIAS = (
    MappingRow("mlp.linear_fc1.bias", "gate_up", {"mlp.gate_proj.bias": ("ffn",), "mlp.up_proj.bias": ("ffn",)}),
    MappingRow("mlp.linear_fc2.bias", "all", {"mlp.down_proj.bias": ("hidden",)}),
)

_DEFAULTS = {"hidden_act": "silu", "tie_word_embeddings": False}
_BIASES = ("attention_bias", "mlp_bias")
_FIXED = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    **{"is_causal": True, "logit_scale": 1.0, "qk_norm": False},  # some models of vLLM apply these, those of transformers do not
}


@dataclass(frozen=True)
class ModelFamily:
    """One `model_type` of Hugging Face: how its config.json is read, how its layers are built, and how its weights are named.

    Attributes:
        name: the model_type.
        layer: the rows of one layer, without those of its experts.
        dense_layer: the rows of each of the `dense_layers` of a model with experts.
        expert: the rows of one expert; its number replaces `{expert}`.
        options: fields of megatron-core's TransformerConfig that this family sets; the layer's spec depends on them.
        defaults: transformers' defaults for fields that config.json lacks.
        fixed: fields that must have this value.
        biases: for each flag of config.json that gives layers a bias, the rows that it adds.
        activation: the activation of the MLP's gate; "gelu_tanh" is the tanh approximation of GELU.
        post_norms: whether attention and MLP each end in a norm, before the residual is added.
        projection_norms: whether queries and keys each pass a norm over all their heads together.
        rotary_share: transformers' default of `partial_rotary_factor`; None: all features must be rotated.
        scores: how experts are chosen. "softmax": by logits in the model's dtype. "sigmoid": by sigmoids of logits in fp32, to
            each of which the expert bias is added for the choice, but not for the experts' weights.
        classifier: whether transformers has a sequence classifier of the family.
        vllm_ties: whether vLLM's model uses the embedding as its output layer when the embeddings are tied.
    """

    name: str
    layer: tuple[MappingRow, ...] = DENSE_LAYER
    dense_layer: tuple[MappingRow, ...] = ()
    expert: tuple[MappingRow, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)
    biases: Mapping[str, tuple[MappingRow, ...]] = field(default_factory=dict)
    activation: Literal["silu", "gelu_tanh"] = "silu"
    post_norms: bool = False
    projection_norms: bool = False
    rotary_share: float | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"
    classifier: bool = True
    vllm_ties: bool = True

    def architecture(self, config: HfConfig) -> Architecture:
        """Reads the sizes. Raises ConfigError for a missing or invalid field, and for a feature that is not supported."""
        config = config.with_defaults({**_DEFAULTS, **self.defaults})
        for name, value in {**_FIXED, **self.fixed}.items():
            config.only(name, value)
        if self.rotary_share is None:
            config.only(PARTIAL, 1.0)
        config.absent("quantization_config")
        config.absent("dual_chunk_attention_config")  # vLLM applies it
        layers = config.integer("num_hidden_layers")
        sliding = self.sliding_layers(config, layers)
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads") if "num_key_value_heads" in config else heads
        head_dim = config.integer("head_dim") if "head_dim" in config else hidden // heads
        if heads % kv_heads:
            raise ConfigError(
                f"num_key_value_heads that divides num_attention_heads, in {config.source}",
                f"{kv_heads} and {heads}",
                "Restore the file from the model's source.",
            )
        if head_dim % 2 or head_dim == 0:
            raise ConfigError(
                f"an even, positive head_dim in {config.source}", str(head_dim), "Restore the file from the model's source."
            )
        max_position = config.integer("max_position_embeddings")
        rope = self.rope(config, max_position)
        if rope.features(head_dim) % 2 or not rope.features(head_dim):
            raise ConfigError(
                f"a {PARTIAL} with an even, positive number of rotated features per head, in {config.source}",
                f"{rope.share:g} of {head_dim}",
                "Restore the file from the model's source.",
            )
        return Architecture(
            family=self.with_biases(config),
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=config.integer("intermediate_size"),
            vocab=config.integer("vocab_size"),
            head="tied" if config.flag("tie_word_embeddings") else "untied",
            norm_eps=config.number("rms_norm_eps"),
            max_position=max_position,
            rope=rope,
            window=config.integer("sliding_window") if any(sliding) else None,
            sliding=sliding,
        )

    def with_biases(self, config: HfConfig) -> "ModelFamily":
        """The family with rows of biases that config.json turns on. Raises ConfigError for a bias that its layers cannot have."""
        rows = list[MappingRow]()
        for name in _BIASES:
            if name not in self.biases:
                config.only(name, False)
            elif name in config and config.flag(name):
                rows += self.biases[name]
        return self.with_rows(rows)

    def with_rows(self, rows: Sequence[MappingRow], **options: object) -> "ModelFamily":
        """The family with more rows in every layer, and with more options of megatron-core."""
        dense = (*self.dense_layer, *rows) if self.dense_layer else ()
        return replace(self, layer=(*self.layer, *rows), dense_layer=dense, options={**self.options, **options})

    def has_bias(self, linear: str) -> bool:
        """Whether this linear layer of every layer has a bias. linear: its name within the layer, such as "mlp.linear_fc1"."""
        return any(row.param == f"{linear}.bias" for row in self.layer)

    def sliding_layers(self, config: HfConfig, layers: int) -> tuple[bool, ...]:
        """For each layer, whether its attention has the window `sliding_window`; empty: no layer has. Raises ConfigError."""
        config.only("use_sliding_window", False)
        config.only("layer_types", ["full_attention"] * layers)
        return ()

    def rope(self, config: HfConfig, max_position: int) -> Rope:
        """The rotary embedding of the layers with full attention. Raises ConfigError."""
        return read_rope(config, max_position, self.rotary_share)
