"""GLM-4.5, GLM-4.6 and their Air models: a few dense layers, then layers of experts balanced by a bias, and one for every token.

Invariant: the experts of a token are those with the largest sums of score and expert bias, and their weights are the scores.
`qk_layernorm` and the two norm rows belong together.
"""

from dataclasses import replace

from polyreme.errors import ConfigError
from polyreme_trainer.megatron.huggingface.families import qwen3
from polyreme_trainer.megatron.huggingface.families.base import DENSE_LAYER, EXPERT_BIAS, QKV_BIAS, Architecture, MappingRow
from polyreme_trainer.megatron.huggingface.families.hf_config import HfConfig
from polyreme_trainer.megatron.huggingface.families.moe import ATTENTION_LAYER, MoeFamily, expert, router, shared_expert


class _Glm4Moe(MoeFamily):
    def architecture(self, config: HfConfig) -> Architecture:
        arch = super().architecture(config)
        config = config.with_defaults(self.defaults)
        config.only("num_local_experts", arch.experts)  # transformers takes it for the same field
        if arch.top_k == 1:
            raise ConfigError(
                f"num_experts_per_tok of at least 2, in {config.source}",
                "1, whose weight megatron-core would not scale to 1",
                "Choose a model without this feature.",
            )
        dense = config.integer("first_k_dense_replace", zero=True)
        if dense >= arch.layers:
            raise ConfigError(
                f"first_k_dense_replace below num_hidden_layers = {arch.layers}, in {config.source}",
                str(dense),
                "Restore the file from the model's source.",
            )
        mtp = "num_nextn_predict_layers" if "num_nextn_predict_layers" in config else "num_mtp_layers"
        norms = config.flag("use_qk_norm")
        return replace(
            arch,
            family=arch.family.with_rows(qwen3.HEAD_NORMS, **qwen3.FAMILY.options) if norms else arch.family,
            dense_layers=dense,
            shared_ffn=arch.expert_ffn * config.integer("n_shared_experts"),
            routed_scale=config.number("routed_scaling_factor"),
            aux_loss_coef=0.0,  # transformers' model has no such loss
            mtp_layers=config.integer(mtp, zero=True),
        )


FAMILY = _Glm4Moe(
    name="glm4_moe",
    layer=(
        *ATTENTION_LAYER,
        router("mlp"),
        MappingRow(EXPERT_BIAS, "all", {"mlp.gate.e_score_correction_bias": ("experts",)}),
        *shared_expert("shared_experts"),
    ),
    dense_layer=DENSE_LAYER,
    expert=expert("mlp", "gate_proj", "up_proj", "down_proj"),
    defaults={
        "num_key_value_heads": 8,
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "use_qk_norm": False,
        "num_mtp_layers": 1,
    },
    fixed={"norm_topk_prob": True, "n_group": 1, "topk_group": 1},
    biases={"attention_bias": (QKV_BIAS,)},
    experts=("n_routed_experts", "num_local_experts"),
    scores="sigmoid",
    rotary_share=0.5,
    classifier=False,
    vllm_ties=False,
)
