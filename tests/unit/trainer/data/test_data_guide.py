"""docs/data.md does what it says: its rows are read, and become the texts that it shows."""

import json
import re
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polyreme.config.data import DataConfig
from polyreme_trainer.data.prompts import load_examples, load_prompts
from polyreme_trainer.data.template import Template

GUIDE = Path(__file__).resolve().parents[4] / "docs" / "data.md"
BLOCK = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in BLOCK.findall(GUIDE.read_text()):
        (tmp_path / name).write_text(text)
    return tmp_path


def template_of(data: DataConfig) -> Template:
    """ChatML over a tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|im_end|>"}).encode(),
        "chat_template.jinja": CHATML.encode(),
        "config.json": json.dumps({"vocab_size": len(alphabet) + 2}).encode(),
    }
    return Template(files, data)


def test_the_rows_of_the_guide_become_what_it_shows(folder: Path) -> None:
    tree = yaml.safe_load((folder / "data.yaml").read_text())["data"]
    data = DataConfig.model_validate(tree | {"train": folder / tree["train"]})
    template = template_of(data)
    prompts = load_prompts(data.train, data, template).prompts
    assert "".join(prompt.text for prompt in prompts) == (folder / "prompts.txt").read_text()
    assert [prompt.label for prompt in prompts] == ["5", "2"]
    assert json.loads(prompts[0].metadata_json)["source"] == "sums"
    examples = load_examples(folder / "sft.jsonl", data, template, max_tokens=160)
    labels = template.decode([example.ids[example.loss_mask == 1] for example in examples], special=True)
    assert "".join(f"{label}\n" for label in labels) == (folder / "labels.txt").read_text()
