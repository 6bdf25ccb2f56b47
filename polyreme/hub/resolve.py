"""The configuration of a start: every name in it found, downloaded, and replaced by the path of its files.

Invariant: it happens once, before anything else opens an input. A name that a record has keeps that record's commit.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from polyreme.config.base import BaseConfig
from polyreme.config.data import DataSource
from polyreme.config.named_input import TRAINING, Nameable, NamedInput, nameable, split_name
from polyreme.config.reward import RewardSpec
from polyreme.config.section import Section
from polyreme.hub.download import download_data, download_model

Config = TypeVar("Config", bound=BaseConfig)
AnySection = TypeVar("AnySection", bound=Section)
Find = Callable[[Nameable, str, DataSource], Path]
"""Returns the path for a source's `path`, from the field's mark and its dotted key. A model is a source with a path alone."""


def resolve_names(config: Config, recorded: Sequence[NamedInput] = ()) -> Config:
    """The configuration with paths in place of names, and `names`, which says what they are.

    A recorded path whose files are gone, or are on another machine, is found again at the same commit.

    Args:
        recorded: what an earlier start of the run, or the parent of a fork, has found.

    Raises:
        ConfigError: no path and no repository has a name, or the hub does not answer and the cache lacks it.
    """
    found: dict[Path, NamedInput] = {}
    resolved = _section(config, "", _finder(config.names, recorded, found))
    return resolved.model_copy(update={"names": list(found.values())}) if found else config


def resolve_section(section: AnySection, key: str, names: Sequence[NamedInput] = ()) -> AnySection:
    """A section of a configuration for a process on any machine, which needs no other input. Otherwise as `resolve_names`.

    Args:
        key: the section's key.
        names: `names` of the configuration.
    """
    return _section(section, f"{key}.", _finder(names, (), {}))


def resolve_path(path: Path, mark: Nameable, key: str, config: str | None = None) -> Path:
    """The path for what a command line names: an existing path as it is, else the files of the model or data set of that name.

    `config`: configuration of the data set. Raises ConfigError, as `resolve_names`."""
    named = split_name(path)
    return path if named is None or path.exists() else _download(mark, key, *named, named[1], config, mark.splits).path


def _finder(names: Sequence[NamedInput], recorded: Sequence[NamedInput], found: dict[Path, NamedInput]) -> Find:
    """A `Find` that adds what it finds to `found`. Arguments as `resolve_names`; `names`: those of the configuration."""
    pinned = {(each.type, each.name, each.asked): each.revision for each in (*recorded, *names)}
    known = {each.path: each for each in names}

    def find(mark: Nameable, key: str, source: DataSource) -> Path:
        if (old := known.get(source.path)) is not None:
            new = (
                old
                if _is_there(old.path)
                else _download(mark, key, old.name, old.asked, old.revision, old.config, [str(old.split)])
            )
        elif (named := split_name(source.path)) is not None:
            commit = pinned.get((mark.kind, *named), named[1])
            splits = [source.split] if isinstance(source.split, str) else TRAINING.splits if source.part else mark.splits
            new = _download(mark, key, *named, commit, source.config, splits)
        else:
            return source.path
        found[new.path] = new
        return new.path

    return find


def _download(
    mark: Nameable, key: str, name: str, asked: str | None, revision: str | None, config: str | None, splits: Sequence[str]
) -> NamedInput:
    print(f"looking up {mark.kind} {name}{f'@{revision}' if revision else ''} ({key})", file=sys.stderr)
    if mark.kind == "model":
        commit, path = download_model(name, revision, key)
        return NamedInput(type="model", name=name, asked=asked, revision=commit, path=path.resolve())
    commit, config, split, path = download_data(name, revision, config, splits, key)
    return NamedInput(type="dataset", name=name, asked=asked, revision=commit, config=config, split=split, path=path.resolve())


def _is_there(path: Path) -> bool:
    return path.exists() or any(path.parent.glob(path.name))


def _section(section: AnySection, prefix: str, find: Find) -> AnySection:
    """The section with what `find` returns in place of each path that may be a name."""
    changed: dict[str, object] = {}
    for name, field in type(section).model_fields.items():
        value, mark = getattr(section, name), nameable(field.metadata)
        new = _inner(value, f"{prefix}{name}", find) if mark is None else _marked(value, mark, f"{prefix}{name}", find)
        if new != value:
            changed[name] = new
    if "model" in changed and isinstance(section, RewardSpec):
        changed["name"] = section.label  # a name of the metrics, which a directory of the cache is not
    return section.model_copy(update=changed) if changed else section


def _inner(value: object, key: str, find: Find) -> object:
    if isinstance(value, Section):
        return _section(value, f"{key}.", find)
    if isinstance(value, list | tuple):
        return type(value)(_inner(each, f"{key}.{place}", find) for place, each in enumerate(value))
    return value


def _marked(value: object, mark: Nameable, key: str, find: Find) -> object:
    if isinstance(value, tuple):
        return tuple(_marked(each, mark, f"{key}.{place}", find) for place, each in enumerate(value))
    if isinstance(value, DataSource):
        path = find(mark, key, value)
        return value if path == value.path else value.model_copy(update={"path": path, "config": None, "split": value.part})
    return find(mark, key, DataSource(path=value)) if isinstance(value, Path) else value
