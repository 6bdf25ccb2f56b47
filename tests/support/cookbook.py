"""What the recipes of tinker-cookbook find in their working directory: a model and data sets in folders with the names of public ones."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

MODEL = "Qwen/Qwen3-8B"
"""A name that the cookbook knows, with the renderer qwen3."""
ANSWER = 7
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEXT = (
    "user assistant How many r's are in strawberry? Provide a numerical answer without units, written inside \\boxed{}. "
    "Let's spell the word out and number all the letters: We have r's at positions What is 3 + 4? say \\boxed{3} "
)
_OPENED, _STOP = "<|im_start|>assistant\n", "<|im_end|>"


def write_files(folder: Path) -> None:
    """The model, whose answers are random digits in a box, and the data sets: sums that are all ANSWER, and chats."""
    tokenizer = _write_tokenizer(folder / MODEL)
    _write_model(folder / MODEL, tokenizer)
    sums = [{"question": f"What is {a % 8} + {ANSWER - a % 8}?", "answer": f"#### {ANSWER}"} for a in range(480)]
    _write_data(folder / "openai/gsm8k", "main", {"train": sums, "test": sums[:4]})
    chats = [[{"role": "user", "content": f"say {i % 8}"}, {"role": "assistant", "content": str(i % 8)}] for i in range(48)]
    rows = [{"messages": chat} for chat in chats]
    _write_data(folder / "HuggingFaceH4/no_robots", "default", {"train": rows, "test": rows[:4]})


def _write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_TEXT] * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_STOP, pad_token=_SPECIAL[0])
    fast.add_tokens(["<think>", "</think>"])
    fast.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    fast.save_pretrained(folder)
    return fast


def _write_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Trains a small model to answer anything with a digit in a box, each digit equally often."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    more: dict[str, Any] = {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0, "bos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **more, **ends))
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    opened = tokenizer.encode(_OPENED)
    for _ in range(150):
        texts = [f"\\boxed{{{digit}}}{_STOP}" for digit in range(10)]
        answers = torch.tensor([tokenizer.encode(text) for text in texts])
        before = torch.cat([torch.randint(3, len(tokenizer), (10, 24)), torch.tensor([opened] * 10)], 1)
        ids = torch.cat([before, answers], 1)
        logits = model(input_ids=ids).logits[:, before.shape[1] - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    model.save_pretrained(folder)


def _write_data(folder: Path, config: str, splits: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """A folder that `datasets.load_dataset("OWNER/NAME", CONFIG)` prefers to the hub."""
    folder.mkdir(parents=True)
    files = "\n".join(f"  - split: {split}\n    path: {split}.jsonl" for split in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}\n---\n")
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_files(Path(sys.argv[1]))
