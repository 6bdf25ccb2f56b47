"""The text of each token, for readers of a run directory.

Invariant: the file is written once, whole, and depends on the run's tokenizer alone.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from polyreme.cli.reader.run import VOCABULARY
from polyreme.cli.run_records import write_atomically

_WORD = "\u2581"
"""What sentencepiece writes for a space in front of a word. Decoding a single token drops it."""


def write_vocabulary(run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Writes the text of every token id, special tokens included, unless the run directory has it.

    Args:
        files: the model's small files; without a tokenizer.json among them, nothing is written.
    """
    path = run_dir / VOCABULARY
    if "tokenizer.json" in files and not path.exists():
        write_atomically(path, json.dumps(token_texts(Tokenizer.from_str(files["tokenizer.json"].decode()))))


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """The text of each token id on its own. A token that is a part of a character becomes the replacement character."""
    texts = []
    for number in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([number], skip_special_tokens=False)
        begins_word = (tokenizer.id_to_token(number) or "").startswith(_WORD) and not text.startswith(" ")
        texts.append(" " + text if begins_word else text)
    return texts
