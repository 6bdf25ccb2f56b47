"""Reads and writes a Hugging Face directory: safetensors files with their index, config.json, and the tokenizer's files.

Invariant: a directory is read only if it has exactly the model's tensors. When it is written, only the tensors of one safetensors
file are in memory at a time, and a file exceeds the size limit only for a single tensor.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from polyreme.terminal.progress_bar import counted
from polyreme_trainer.convert.layout import TRACKER
from polyreme_trainer.convert.names import check_shapes
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.export import classifier_config, with_dtype
from polyreme_trainer.megatron.huggingface.families.base import LM_HEAD, Architecture
from polyreme_trainer.megatron.huggingface.hf_files import open_tensors, save_tensors

SHARD_BYTES = 4 << 30
_NOT_COPIED = (".safetensors", ".index.json", ".bin", ".pt", ".pth", TRACKER)
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
"""Numbers that old directories have although the configuration determines them."""


@contextlib.contextmanager
def read(path: Path, arch: Architecture) -> Iterator[Mapping[str, Tensor]]:
    """A directory's tensors, opened. Raises ConfigError unless they are the model's.

    A critic may have the language model's head, which it never uses. MTP layers, which no model reads, are left out.
    """
    shapes, aliases = hf_mapping.hf_shapes(arch), hf_mapping.hf_aliases(arch)
    unused = {LM_HEAD} if arch.head == "value" else aliases.keys()
    with open_tensors(path) as opened:
        names = [name for name in opened if name not in shapes and name not in unused and not name.startswith(arch.unread)]
        others = {name: (0,) for name in names if not _COMPUTED.search(name)}
        if others:
            check_shapes(shapes, {name: shapes[name] for name in shapes if name in opened} | others, str(path))
        opened.check(shapes, aliases, arch.unread)
        yield opened


def write(target: Path, tensors: Mapping[str, Tensor], config: Path, *, critic: bool, shard_bytes: int = SHARD_BYTES) -> None:
    """Fills an empty directory.

    Args:
        tensors: the tensors by Hugging Face name; they are read one after the other.
        config: a directory whose small files are copied; config.json gets the dtype of the weights.
        critic: whether to convert config.json to that of a sequence classifier with one label.
    """
    names, dtype = [], ""
    for number, shard in enumerate(_shards(tensors, shard_bytes), start=1):
        save_tensors(shard, target / f"shard-{number}")
        dtype = dtype or str(next(iter(shard.values())).dtype).removeprefix("torch.")
        names.append(list(shard))
    for file in sorted(config.iterdir()):
        if file.is_file() and not file.name.endswith(_NOT_COPIED):
            content = file.read_bytes()
            if file.name == "config.json":
                content = with_dtype(classifier_config(content) if critic else content, dtype)
            (target / file.name).write_bytes(content)
    if len(names) == 1:
        (target / "shard-1").rename(target / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, inside in enumerate(names, start=1):
        file_name = f"model-{number:05d}-of-{len(names):05d}.safetensors"
        (target / f"shard-{number}").rename(target / file_name)
        weight_map |= dict.fromkeys(inside, file_name)
    size = sum((target / name).stat().st_size for name in set(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(tensors: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Groups of consecutive tensors of at most `limit` bytes, or of a single tensor."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in counted(tensors.items(), "converting", len(tensors)):
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    yield shard
