"""The rows of docs/data.md become the texts that it shows."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polyreme.config.data import DataConfig
from polyreme.config.load import resolve_paths
from polyreme.config.run import RunConfig
from polyreme.dataset.source import read_objects
from polyreme_trainer.data.prompts import load_prompts
from polyreme_trainer.data.supervised import load_examples
from polyreme_trainer.data.template import Template
from support import guide
from support.chat_templates import chat_model_files

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    guide.write_files("data.md", tmp_path)
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


def load_tree(path: Path) -> dict[str, Any]:
    """The section `data` of a file, with its paths resolved."""
    tree = {"data": yaml.safe_load(path.read_text())["data"]}
    resolve_paths(tree, RunConfig, path.parent)
    return dict(tree["data"])


def test_the_rows_of_the_guide_become_what_it_shows(folder: Path) -> None:
    data = DataConfig.model_validate(load_tree(folder / "data.yaml"))
    template = template_of(data)
    prompts = load_prompts(data.train, data, template).prompts
    assert "".join(prompt.text for prompt in prompts) == (folder / "prompts.txt").read_text()
    assert [prompt.label for prompt in prompts] == ["5", "2"]
    assert json.loads(prompts[0].metadata_json)["source"] == "sums"
    examples = list(load_examples(folder / "sft.jsonl", data, template, max_tokens=160))
    labels = template.decode([example.ids[example.loss_mask == 1] for example in examples], special=True)
    assert "".join(f"{label}\n" for label in labels) == (folder / "labels.txt").read_text()


def test_the_sources_of_the_guide_are_mixed(folder: Path) -> None:
    tree = load_tree(folder / "mix.yaml")
    data = DataConfig.model_validate(tree)
    template = template_of(data)
    train = load_prompts(data.train, data, template)
    kinds = [json.loads(prompt.metadata_json)["kind"] for prompt in train.prompts]
    assert kinds == ["sums"] * train.sizes[0] + ["words"] * train.sizes[1]
    assert data.weights == (3, 1) and data.eval is not None
    held_out = {row.fields["reward_model"]["ground_truth"] for row in read_objects(data.eval)}
    assert held_out.isdisjoint(prompt.label for prompt in train.prompts)
    assert held_out | {prompt.label for prompt in train.prompts} == {"5", "2", "a", "b", "c", "d"}


def test_messages_and_tools_of_the_guide_reach_the_template(folder: Path) -> None:
    data = DataConfig(train=folder / "tools.jsonl")
    one, other = load_prompts(data.train, data, Template(chat_model_files("chatml"), data)).prompts
    assert one.plain == "What is 2+3?" and "What is 2+3?<|im_end|>" in one.text
    assert '{"type": "function", "function": {"name": "add", "description": "Adds."}}' in other.text
    assert '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}<|im_end|>' in other.text
