"""The text of each token in the run directory."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models

from polyreme_trainer.observe.vocabulary import token_texts, write_vocabulary
from support.tiny_tokenizer import model_files


def test_every_token_has_its_text_and_the_file_is_written_once(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, model_files())
    path = tmp_path / "vocabulary.json"
    texts = json.loads(path.read_text())
    tokenizer = Tokenizer.from_str(model_files()["tokenizer.json"].decode())
    assert len(texts) == tokenizer.get_vocab_size() and texts[tokenizer.token_to_id("7")] == "7"
    path.write_text("[]")
    write_vocabulary(tmp_path, model_files())
    assert path.read_text() == "[]"


def test_a_word_of_sentencepiece_keeps_its_space() -> None:
    tokenizer = Tokenizer(models.WordLevel({"\u2581sum": 0, "sum": 1}, unk_token="sum"))
    assert token_texts(tokenizer)[0].startswith(" ") and token_texts(tokenizer)[1] == "sum"


def test_a_model_without_a_tokenizer_file_has_none(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, {})
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_cannot_be_read_stops_no_records(tmp_path: Path) -> None:
    write_vocabulary(tmp_path, {"tokenizer.json": b"[]"})
    assert not list(tmp_path.iterdir())
