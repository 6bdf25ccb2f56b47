"""Chat templates in the styles of public families, a tokenizer of bytes that loses no character, and conversations for them."""

import json
from datetime import date
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from support.tiny_tokenizer import SIZES

_ENDS = ["<|im_start|>", "<|im_end|>", "<|eot|>", "</s>"]

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}{{- '}' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

THINKING = """{%- if tools %}{{- '<|im_start|>tools' }}{%- for tool in tools %}{{- tool.function.name + tool | tojson }}{%- endfor %}{{- '<|im_end|>' }}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- if loop.index0 > ns.last and message.reasoning_content is string %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {{- content.split('</think>')[-1] if loop.index0 < ns.last else content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '<tool_call>' + call.name }}{{- call.arguments if call.arguments is string else call.arguments | tojson }}
        {%- endfor %}
    {%- else %}
        {{- content }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

HEADERS = """{{- '<|head|>system<|/head|>Today: ' + strftime_now('%d %b %Y') }}
{%- if tools is not none and tools %}{%- for tool in tools %}{{- tool | tojson(indent=4) }}{%- endfor %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] | trim }}{%- set messages = messages[1:] %}{%- endif %}
{{- '<|eot|>' }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|/head|>' + message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|head|>assistant<|/head|>{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot|>' }}
    {%- else %}
        {{- '<|head|>ipython<|/head|>' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant<|/head|>' }}{%- endif %}"""

STRICT = """{%- for message in messages %}
    {%- if message['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('roles must alternate user/assistant') }}{%- endif %}
    {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
    {%- else %}{{- ' ' + message['content'] + '</s>' }}{%- endif %}
{%- endfor %}"""

TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "headers": HEADERS, "strict": STRICT}
STOPS = {"chatml": "<|im_end|>", "thinking": "<|im_end|>", "headers": "<|eot|>", "strict": "</s>"}


def chat_model_files(style: str) -> dict[str, bytes]:
    """A model directory's small files with the template of a style and a tokenizer of bytes."""
    vocabulary = 256 + len(_ENDS)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOPS[style]}
    return {
        "tokenizer.json": _tokenizer_json(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "config.json": json.dumps({"model_type": "qwen2", "vocab_size": vocabulary, **SIZES}).encode(),
        "chat_template.jinja": TEMPLATES[style].encode(),
    }


@cache
def _tokenizer_json() -> bytes:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: place for place, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_ENDS)
    return tokenizer.to_str().encode()


DAY = date(2026, 1, 2)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"b": {"type": "number"}, "a": {"type": "number", "description": "é"}}},
    },
}
CALL: dict[str, Any] = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"b": 2, "a": [1]}}}
ASKED = {"role": "user", "content": "What is 1+2?\nSay it."}
SYSTEM = {"role": "system", "content": " Be brief. "}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "add", "content": '{"sum": 3}'}

CASES: dict[str, tuple[list[dict[str, Any]], Any, list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    # messages and tools of a row, and what the template gets
    "text": ([ASKED], None, [ASKED], None),
    "system": ([SYSTEM, ASKED], None, [SYSTEM, ASKED], None),
    "turns": (
        [ASKED, {"role": "assistant", "content": "3"}, ASKED],
        [],
        [ASKED, {"role": "assistant", "content": "3"}, ASKED],
        None,
    ),
    "parts": (
        [{"role": "user", "content": [{"type": "text", "text": "What is 1+2?"}, {"type": "text", "text": "\nSay it."}]}],
        None,
        [ASKED],
        None,
    ),
    "nulls": ([{**ASKED, "tool_calls": None, "name": None, "reasoning_content": None}], None, [ASKED], None),
    "sharegpt": ([{"from": "human", "value": ASKED["content"]}], None, [ASKED], None),
    "tools": ([ASKED], [TOOL], [ASKED], [TOOL]),
    "tools as text": ([ASKED], json.dumps([TOOL]), [ASKED], [TOOL]),
    "functions": ([ASKED], [json.dumps(TOOL["function"])], [ASKED], [TOOL]),
    "calls": (
        [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT],
        [TOOL],
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
        [TOOL],
    ),
    "calls as text": (
        [
            ASKED,
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "add", "arguments": json.dumps(CALL["function"]["arguments"])}}],
            },
            {**RESULT, "content": [{"type": "text", "text": RESULT["content"]}]},
        ],
        [TOOL],
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT],
        [TOOL],
    ),
    "thought": (
        [ASKED, {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}, RESULT],
        [TOOL],
        [ASKED, {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]}, RESULT],
        [TOOL],
    ),
}
"""The last message is by the user or a tool: an answer follows."""
