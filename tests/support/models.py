"""Tiny Hugging Face directories: real architectures, random weights, a few thousand parameters."""

from pathlib import Path
from typing import Literal

Kind = Literal["tied", "untied"]


def tiny_model(kind: Kind, path: Path, seed: int = 0, hidden_size: int = 32) -> Path:
    """Saves a model with `transformers` and returns its directory.

    tied: Qwen2, grouped-query (4 heads, 2 groups), query/key/value bias, tied embeddings, 45 tokens.
    untied: Llama, grouped-query (4 heads, 2 groups), untied, 50 tokens.
    hidden_size: 128 for vLLM, whose CPU attention starts at 32 numbers per head.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "tied":
            model = Qwen2ForCausalLM(Qwen2Config(vocab_size=45, tie_word_embeddings=True, **sizes))
        else:
            model = LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=False, rms_norm_eps=1e-5, **sizes))
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms start at constants: make every number matter
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(path)
    return Path(path)
