"""From token ids to texts."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from polyreme.config.data import DataConfig
from polyreme_trainer.data.template import Template
from support.tiny_tokenizer import model_files


def template_of(tokenizer: Tokenizer) -> Template:
    files = {**model_files(), "tokenizer.json": tokenizer.to_str().encode()}
    files["config.json"] = json.dumps({"model_type": "qwen2", "vocab_size": 1000}).encode()
    files.pop("chat_template.jinja")
    return Template(files, DataConfig(train=Path("unused"), template="none"))


@pytest.fixture(scope="module")
def byte_level() -> Template:
    """Tokens of single bytes, so that most characters outside ASCII take several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<unk>", "<eos>"])
    return template_of(tokenizer)


@pytest.fixture(scope="module")
def byte_fallback() -> Template:
    """A tokenizer like sentencepiece's: a space is part of the next word, and unknown characters are bytes."""
    words = ["<pad>", "<unk>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "a", "\u2581a", "."]
    tokenizer = Tokenizer(models.BPE({w: place for place, w in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<pad>", "<unk>", "<eos>"])
    return template_of(tokenizer)


def test_each_token_has_its_text(byte_level: Template) -> None:
    ids = byte_level.encode(["a\u00e9\U0001f600<eos>"])[0].tolist()
    assert byte_level.token_texts(ids) == ["a", "", "\u00e9", "", "", "", "\U0001f600", "<eos>"]
    assert byte_level.token_texts([]) == []


def test_a_character_that_the_length_limit_cuts_is_the_last_tokens(byte_level: Template) -> None:
    texts = byte_level.token_texts(byte_level.encode(["ab\u00e9"])[0].tolist()[:-1])
    assert texts == ["a", "b", "\ufffd"]


def test_a_space_belongs_to_its_word(byte_fallback: Template) -> None:
    ids = byte_fallback.encode(["<eos>"])[0].tolist()
    the, a = (259 + place for place in (1, 3))
    assert byte_fallback.token_texts([the, a, the, *ids]) == ["the", " a", " the", "<eos>"]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_texts_of_any_tokens_make_up_the_whole(name: str, request: pytest.FixtureRequest) -> None:
    """This includes bytes that are not valid text, which a policy may sample."""
    template, source = request.getfixturevalue(name), random.Random(0)
    for _ in range(300):
        ids = [source.randrange(template.tokens) for _ in range(source.randint(1, 30))]
        texts = template.token_texts(ids)
        assert len(texts) == len(ids)
        assert "".join(texts) == template.decode([ids], special=True)[0]
