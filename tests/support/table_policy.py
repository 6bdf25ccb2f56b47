"""Real models whose next token depends on the last one alone: Llamas. `MULTIPLYING` calls the tool `multiply`, and answers 408 once it sees a
result; an answer of it has tokens with which no text is encoded. `GUESSING` says a number in the manner of Qwen3.

Several tokens have equal probability.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SIZE, CONTEXT = 64, 8192
_CERTAIN = 30.0


@dataclass(frozen=True)
class TablePolicy:
    """A model as the tokens that may follow each token, each as likely as the others. The end token follows all that have none.

    Attributes:
        special: tokens that no text is decoded to; the first three are for padding, the end of an answer, and unknown text.
    """

    special: Sequence[str]
    next: Mapping[str, Sequence[str]]
    template: str
    ids: Mapping[str, int] = field(init=False)
    names: Mapping[int, str] = field(init=False)

    def __post_init__(self) -> None:
        tokens = dict.fromkeys([*self.special, *self.next, *(token for after in self.next.values() for token in after)])
        object.__setattr__(self, "ids", {token: place for place, token in enumerate(tokens)})
        object.__setattr__(self, "names", dict(enumerate(tokens)))

    def after(self, token: str) -> Sequence[str]:
        return self.next.get(token) or [self.special[1]]

    def logprob(self, before: int, token: int) -> float:
        """Of a token behind another one."""
        after = self.after(self.names[before])
        return -math.log(len(after)) if self.names[token] in after else -math.inf

    def write(self, path: Path) -> Path:
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
            eos_token_id=1,
            pad_token_id=0,
        )
        model = LlamaForCausalLM(config)
        head = torch.zeros(SIZE, SIZE)
        for token, place in self.ids.items():
            for after in self.after(token):
                head[self.ids[after], place] = _CERTAIN / math.sqrt(SIZE)  # the norm makes a hidden state of length sqrt(SIZE)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    parameter.zero_()  # what remains of a layer is its input
            model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
            model.lm_head.weight.copy_(head)
        model.save_pretrained(path)
        pad, end, unknown, *_ = self.special
        tokenizer = Tokenizer(models.WordLevel(vocab=dict(self.ids), unk_token=unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[\s\S]"), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens(list(self.special))
        (path / "tokenizer.json").write_text(tokenizer.to_str())
        names = {"pad_token": pad, "unk_token": unknown, "eos_token": end}
        (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
        (path / "chat_template.jinja").write_text(self.template)
        return path


THOUGHT, SPOKEN, CALL = "<think>\nuse it\n</think>\n\n", "Let me see.  \n", '<tool_call>\n{"name": "multiply", '
ARGUMENTS = ('"arguments": {"a": 12, "b": 34}}\n', '"arguments":  {"a": 12,  "b":34}}\n')
MULTIPLYING = TablePolicy(
    ["<pad>", "<eos>", "<unk>", "<user>", "<system>", "<tool>", "<assistant>", "<answer>"],
    {
        "<assistant>": [THOUGHT, SPOKEN],
        THOUGHT: [SPOKEN],
        SPOKEN: [CALL],
        CALL: [*ARGUMENTS],
        **{arguments: ["</tool_call>"] for arguments in ARGUMENTS},
        "<answer>": ["408", "40"],
        "=": ["408", "40"],
        "40": ["8"],
    },
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<answer>' if '408' in messages[-1].content else '<assistant>' }}{% endif %}",
)
GUESSING = TablePolicy(
    [
        *("<pad>", "<|im_end|>", "<unk>", "<|im_start|>", "<|endoftext|>", "<think>", "</think>"),
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ],
    {"\n": [*"123456789"], **dict.fromkeys(["user", "assistant", "guess", "higher", "lower", "number"], ())},
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
)
