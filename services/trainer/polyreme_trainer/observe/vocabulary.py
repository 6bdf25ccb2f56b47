"""The text of each token, for readers of a run directory.

Invariant: the file is written once, completely, and depends only on the run's tokenizer.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from polyreme.rundir.reader.run import VOCABULARY
from polyreme.rundir.run_records import write_atomically

logger = logging.getLogger(__name__)

_WORD = "\u2581"
"""Sentencepiece's character for a space before a word. Decoding a single token drops it."""


def write_vocabulary(run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Writes the text of every token id, including special tokens, unless the file exists.

    Args:
        files: the model's small files; without a readable tokenizer.json, nothing is written.
    """
    path = run_dir / VOCABULARY
    if "tokenizer.json" not in files or path.exists():
        return
    try:
        tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    except Exception as error:  # noqa: BLE001 - tokenizers raises plain Exception
        logger.warning("no %s: tokenizer.json cannot be read: %s", VOCABULARY, error)
        return
    write_atomically(path, json.dumps(token_texts(tokenizer)))


def token_texts(tokenizer: Tokenizer) -> list[str]:
    """The text of each token id on its own. A token that is a part of a character becomes the replacement character."""
    texts = []
    for number in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([number], skip_special_tokens=False)
        begins_word = (tokenizer.id_to_token(number) or "").startswith(_WORD) and not text.startswith(" ")
        texts.append(" " + text if begins_word else text)
    return texts
