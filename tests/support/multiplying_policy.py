"""A real model that calls the tool `multiply`, and answers 408 once it sees a result: a Llama whose next token depends on the last one alone.

Several tokens have equal probability, and an answer has tokens with which no text is encoded.
"""

import json
import math
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<pad>", "<eos>", "<unk>", "<user>", "<system>", "<tool>", "<assistant>", "<answer>"]
THOUGHT, SPOKEN, CALL = "<think>\nuse it\n</think>\n\n", "Let me see.  \n", '<tool_call>\n{"name": "multiply", '
ARGUMENTS = ('"arguments": {"a": 12, "b": 34}}\n', '"arguments":  {"a": 12,  "b":34}}\n')
NEXT = {
    "<assistant>": [THOUGHT, SPOKEN],
    THOUGHT: [SPOKEN],
    SPOKEN: [CALL],
    CALL: [*ARGUMENTS],
    **{arguments: ["</tool_call>"] for arguments in ARGUMENTS},
    "<answer>": ["408", "40"],
    "=": ["408", "40"],
    "40": ["8"],
}
"""The tokens that may follow a token, each as likely as the others. The end token follows all others."""
VOCABULARY = {
    token: place for place, token in enumerate(dict.fromkeys([*SPECIAL, *NEXT, *(t for ts in NEXT.values() for t in ts)]))
}
SIZE, CONTEXT = 64, 8192
_CERTAIN = 30.0
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<answer>' if '408' in messages[-1].content else '<assistant>' }}{% endif %}"
)


def logprob(before: str, token: str) -> float:
    """Of a token behind another one."""
    after = NEXT.get(before, ["<eos>"])
    return -math.log(len(after)) if token in after else -math.inf


def write_policy(path: Path) -> Path:
    """Writes the model's directory."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=SIZE,
        intermediate_size=SIZE,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=VOCABULARY["<eos>"],
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    head = torch.zeros(SIZE, SIZE)
    for token, place in VOCABULARY.items():
        for after in NEXT.get(token, ["<eos>"]):
            head[VOCABULARY[after], place] = _CERTAIN / math.sqrt(SIZE)  # the norm makes a hidden state of length sqrt(SIZE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()  # what remains of a layer is its input
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        model.lm_head.weight.copy_(head)
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel(vocab=VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path
