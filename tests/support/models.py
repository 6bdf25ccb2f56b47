"""Tiny Hugging Face directories: real architectures, random weights, a few thousand parameters."""

import json
from pathlib import Path
from typing import Any, Literal

from support.tiny_tokenizer import CHAT_TEMPLATE, model_files, vocabulary

Kind = Literal["tied", "untied"]


def tiny_model(kind: Kind, path: Path, seed: int = 0, hidden_size: int = 32, context: int = 128, layers: int = 2) -> Path:
    """Saves a model with `transformers` and returns its directory.

    tied: Qwen2, grouped-query (4 heads, 2 groups), query/key/value bias, tied embeddings, 45 tokens.
    untied: Llama, grouped-query (4 heads, 2 groups), untied, 50 tokens.
    hidden_size: 128 for vLLM, whose CPU attention starts at 32 numbers per head.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": hidden_size,
        "intermediate_size": 56,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel
        if kind == "tied":
            model = Qwen2ForCausalLM(Qwen2Config(vocab_size=45, tie_word_embeddings=True, **sizes))
        else:
            model = LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=False, rms_norm_eps=1e-5, **sizes))
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms start as constants; random values make every number matter
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(path)
    return Path(path)


FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "query_pre_attn_scalar": 24},
    "qwen3_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2, "head_dim": 8},  # transformers norms hidden_size numbers
    "glm4_moe": {
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.8,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}
"""Fields with which a tiny model of the family has all of its parts."""


def tiny_family_model(model_type: str, path: Path, seed: int = 0, **fields: Any) -> Path:
    """Saves a random model of any family with `transformers` and returns its directory.

    Tied embeddings, grouped-query (4 heads of 12, 2 groups), 45 tokens, unless `fields` of the config change them.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 45,
        "hidden_size": 32,
        "head_dim": 12,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    fields = sizes | FAMILY_FIELDS.get(model_type, {}) | fields
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields))
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms start as constants; random values make every number matter
                parameter.add_(torch.randn_like(parameter) * 0.05)
            for name, tensor in model.state_dict().items():
                if name.endswith("e_score_correction_bias"):  # large enough to change which experts are chosen
                    tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(path)
    return Path(path)


def tiny_reward_model(
    path: Path, *, outputs: int = 1, pad: int | None = 0, template: str | None = CHAT_TEMPLATE, seed: int = 0, wide: int = 56
) -> Path:
    """Saves a random Qwen2 sequence classifier with the tiny tokenizer, whose padding side is the wrong one; returns its directory.

    pad: the model's padding token; None: it has none. wide: size of its MLP. The text "z" makes its output NaN.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    config = Qwen2Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=wide,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16384,
        pad_token_id=pad,
        num_labels=outputs,  # type: ignore[call-arg]  # of its base class
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForSequenceClassification(config)
        embeddings = model.get_input_embeddings()
        assert isinstance(embeddings, torch.nn.Embedding)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
            embeddings.weight[vocabulary()["z"]] = float("nan")
    model.save_pretrained(path)
    for name, content in model_files(template).items():
        if name != "config.json":
            (path / name).write_bytes(content)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": "left"}))
    return path
