"""Rows of a data source: a file of any known format, a directory of files, or several of these.

Invariant: the rows and their order depend only on the content of the files and the source's keys.
"""

import json
import re
from collections.abc import Callable, Iterator
from glob import glob
from itertools import chain
from pathlib import Path

import xxhash

from polyreme.config.data import DataSource, Sources, TaskSource
from polyreme.dataset.arrow_files import read_arrow, read_parquet
from polyreme.dataset.chat import check_text_only
from polyreme.dataset.columns import column_names, value_at
from polyreme.dataset.megatron_files import packed_files, read_megatron
from polyreme.dataset.text_files import Fields, Row, read_csv, read_json
from polyreme.errors import DataError

READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
    ".idx": read_megatron,
    ".bin": read_megatron,
}
"""The reader of each suffix. A file with another suffix is read as JSON lines."""

ALLOWED_TOOLS = "allowed_tools"
"""The column with the names of the tools that the policy may call for a row, for a source with `tools`. Without it, all."""

_BLOCK, _BLOCKS = 1 << 20, 64
"""Size of a block in bytes, and number of blocks of a file, in a digest."""


def as_sources(data: Sources) -> tuple[DataSource, ...]:
    """The sources of `data.train` or `data.eval`, in their order."""
    parts = data if isinstance(data, tuple) else (data,)
    return tuple(part if isinstance(part, DataSource) else DataSource(path=part) for part in parts)


def name_of(data: Sources) -> str:
    """The paths of the sources, as text for messages."""
    return ", ".join(str(source.path) for source in as_sources(data))


def read_objects(data: Sources) -> Iterator[Row]:
    """The rows of all sources, one source after the other. Reads lazily.

    Raises:
        DataError: a file is missing or damaged, a row is no JSON object or needs more than a text model, or a source has no row.
    """
    for source in as_sources(data):
        rows = _read_source(source)
        first = next(rows, None)
        if first is None:
            part = "" if source.part is None else f" and data.*.split {list(source.part)}"
            raise DataError(f"at least one row in {source.path}{part}", "none", "Write one JSON object per line.")
        for row in chain((first,), rows):
            check_text_only(row.fields, row.where)
            yield row


def bytes_of(data: Sources) -> int:
    """The size of all sources' files in bytes. For Megatron's files, only the tokens of the first one count. Raises DataError."""
    paths = [path for source in as_sources(data) for path in files_of(source.path)]
    tokens = (path.with_suffix(".bin") if path.suffix == ".idx" else path for path in paths)
    return sum(path.stat().st_size for path in tokens if path.exists())


def digest_of(data: Sources, block: int = _BLOCK) -> str:
    """16 hex digits of the content of the sources' files; empty when a file is missing.

    For a file beyond 64 blocks it uses the size and 64 evenly spaced blocks. `block`: bytes, by default 1 MiB.
    """
    digest = xxhash.xxh3_64()
    try:
        for path in (path for source in as_sources(data) for path in files_of(source.path)):
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with open(path, "rb") as file:
                for number in range(min(_BLOCKS, -(-size // block))):
                    file.seek(max(number * block, number * (size - block) // (_BLOCKS - 1)))
                    digest.update(file.read(block))
    except (OSError, DataError):  # the check of the inputs reports what is missing
        return ""
    return digest.hexdigest()


def files_of(path: Path) -> list[Path]:
    """The files of a source, in their order: a file itself, those that match a path with `*` or `?`, or those of a directory.
    Hidden files are left out.

    Raises:
        DataError: there is none, or a directory has several splits or formats.
    """
    if re.search(r"[*?]", str(path)) and not path.exists():
        pattern = str(path).replace("[", "[[]")  # of a folder's name
        found = sorted(each for each in map(Path, glob(pattern)) if each.is_file())
    elif path.is_dir():
        found = _files_in(path)
    else:
        return [path] if path.exists() else packed_files(path)[:1] or [path]
    if not found:
        raise DataError(f"data files ({', '.join(READERS)}) at {path}", "none", "Fix the path in `data`.")
    return found


def _files_in(folder: Path) -> list[Path]:
    if (state := folder / "state.json").is_file():  # written by save_to_disk of Hugging Face `datasets`
        try:
            return [folder / file["filename"] for file in json.loads(state.read_text())["_data_files"]]
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"a saved data set in {folder}", f"{error!r} in state.json", "Save it again.") from None
    if (splits := folder / "dataset_dict.json").is_file():
        names = [path.parent.name for path in sorted(folder.glob("*/state.json"))]
        raise DataError(
            f"one data set in {folder}",
            f"the splits {', '.join(names)} ({splits.name})",
            f"Name one: {folder}/{names[0] if names else 'train'}.",
        )
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and _is_data(path.name)]
    kinds = sorted({f"{path.stem.partition('-0')[0] if '-of-' in path.stem else '*'}{path.suffix}" for path in files})
    if len(kinds) > 1:
        raise DataError(f"files of one split and one format in {folder}", ", ".join(kinds), "Name some: FOLDER/train-*.parquet.")
    return files


def _is_data(name: str) -> bool:
    """Whether a file of a directory is data. A compressed one is, too, so that its reader says that it cannot read it."""
    suffixes = Path(name).suffixes[-2:]
    compressed = len(suffixes) > 1 and suffixes[0] in READERS and suffixes[1] in (".gz", ".bz2", ".xz", ".zst", ".zip")
    return not name.startswith(".") and (compressed or Path(name).suffix in READERS.keys() - {".bin"})


def _read_source(source: DataSource) -> Iterator[Row]:
    tools = source.tools if isinstance(source, TaskSource) else None
    added = source.add if tools is None else {**source.add, ALLOWED_TOOLS: [*tools]}
    for file in files_of(source.path):
        for where, fields in READERS.get(file.suffix, read_json)(file):
            if _is_chosen(fields, source, where):
                renamed = {new: _column(fields, old, where, "rename") for new, old in source.rename.items()}
                yield Row(where, {**fields, **renamed, **added})


def _is_chosen(fields: Fields, source: DataSource, where: str) -> bool:
    """Whether a row is in the source's part. Rows with equal content have the same position in [0, 1)."""
    if source.part is None:
        return True
    content = fields if source.split_by is None else _column(fields, source.split_by, where, "split_by")
    place = xxhash.xxh3_64_intdigest(json.dumps(content, sort_keys=True).encode()) / 2.0**64
    return source.part[0] <= place < source.part[1]


def _column(fields: Fields, key: str, where: str, setting: str) -> object:
    missing = object()
    value = value_at(fields, key, missing)
    if value is missing:
        raise DataError(f"a column {key!r} in {where}", f"columns {column_names(fields)}", f"Fix the row, or `{setting}`.")
    return value
