"""Chat templates that behave as those of the model families do, and a tokenizer that can cut one text in several ways.

They imitate what the published templates strip, drop and add; their wording is ours.
"""

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<pad>", "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<bos>", "<eos>", "[INST]", "[/INST]"]
SPECIAL += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]

_TOOLS = "{% if tools %}{{ '\n# Tools\n' ~ (tools | tojson) }}{% endif %}"
_CALLS = (
    '{% for c in m.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' ~ c.function.name ~ \'", "arguments": \''
    " ~ (c.function.arguments | tojson) ~ '}\n</tool_call>' }}{% endfor %}"
)
_RESULT = "{{ '<|im_start|>user\n<tool_response>\n' ~ m.content ~ '\n</tool_response><|im_end|>\n' }}"

QWEN25 = (  # a default system message; arguments are written anew
    "{{ '<|im_start|>system\n' ~ (messages[0].content if messages[0].role == 'system' else 'You help.') }}" + _TOOLS + "{{ '<|im_end|>\n' }}"
    "{% for m in messages %}{% if m.role == 'system' and loop.first %}{% elif m.role == 'tool' %}" + _RESULT + "{% else %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}" + _CALLS + "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
QWEN3 = (  # thoughts before the last user message are dropped, and an empty one is written into the last answer; content is stripped
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if messages[0].role == 'system' or tools %}{{ '<|im_start|>system\n' ~ (messages[0].content if messages[0].role == 'system' else '') }}"
    + _TOOLS + "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% elif m.role == 'tool' %}" + _RESULT + "{% elif m.role == 'assistant' %}"
    "{% set c = m.content.split('</think>')[-1] %}{% set r = m.content.split('</think>')[0] if '</think>' in m.content else '' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' ~ r.replace('<think>', '').strip('\n') ~ '\n</think>\n\n' }}{% endif %}{{ c.strip('\n') }}"
    + _CALLS + "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)  # fmt: skip
LLAMA3 = (  # content is trimmed, and a system message is always there
    "{{ '<bos><|start_header_id|>system<|end_header_id|>\n\nToday: 26 Jul 2024\n\n' }}"
    "{{ messages[0].content.strip() if messages[0].role == 'system' else '' }}{{ (tools | tojson) if tools else '' }}{{ '<|eot_id|>' }}"
    "{% for m in messages %}{% if m.role == 'system' %}{% else %}"
    "{{ '<|start_header_id|>' ~ ('ipython' if m.role == 'tool' else m.role) ~ '<|end_header_id|>\n\n' }}"
    "{% if m.tool_calls %}{{ {'name': m.tool_calls[0].function.name, 'parameters': m.tool_calls[0].function.arguments} | tojson }}"
    "{% else %}{{ m.content.strip() }}{% endif %}{{ '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (  # no opening of an answer, and roles must alternate
    "{{ '<bos>' }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate!') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}{% else %}{{ ' ' ~ m.content ~ '<eos>' }}{% endif %}{% endfor %}"
)
GEMMA = (  # the assistant is called model; content is trimmed
    "{{ '<bos>' }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '<start_of_turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\n' ~ (m.content | trim) ~ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
TEMPLATES = {
    "qwen2.5": (QWEN25, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "mistral": (MISTRAL, "<eos>"),
    "gemma": (GEMMA, "<end_of_turn>"),
}
"""The template of each family, and its end token."""


@cache
def _tokenizer_json() -> bytes:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = ["the guess is higher lower number hello world you are a helper user system answer think 12 34"] * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet))
    return tokenizer.to_str().encode()


def family_files(family: str) -> dict[str, bytes]:
    """A model directory's small files by name, with the template of a family and a byte-level BPE tokenizer with merges."""
    template, end = TEMPLATES[family]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "unk_token": "<unk>", "eos_token": end}
    return {
        "tokenizer.json": _tokenizer_json(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps({"eos_token_id": None}).encode(),
        "config.json": json.dumps({"model_type": "qwen2", "vocab_size": 1024}).encode(),
        "chat_template.jinja": template.encode(),
    }
