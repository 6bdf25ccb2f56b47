"""Downloads of repositories by `huggingface_hub` and `datasets`, which have the cache, token and offline mode of other programs.

Invariant: what is returned is of the commit that was asked for. `datasets` takes the newest cached copy of any commit when the
hub does not answer, so the commit of what it loads is compared.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from polyreme.errors import ConfigError, PolyremeError

_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""The files of a model that anything here reads."""


def hub_address() -> str:
    """The address of the hub: HF_ENDPOINT, or Hugging Face's own."""
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def download_model(name: str, revision: str | None, key: str) -> tuple[str, Path]:
    """The commit and the local directory of a model.

    Args:
        name: owner/name.
        revision: branch, tag or commit; None: the default branch.
        key: the configuration's key, for errors.

    Raises:
        ConfigError: the hub has no such model, or does not answer and the cache lacks it.
    """
    with _explained("model", name, revision, key):
        return _snapshot(name, "model", revision, _MODEL_FILES)


def download_data(
    name: str, revision: str | None, config: str | None, splits: Sequence[str], key: str
) -> tuple[str, str, str, Path]:
    """The commit, configuration, split and rows of a data set. The rows are Arrow files: a file, or a path with `*` for several.

    Args:
        name, revision, key: as for a model.
        config: configuration of the repository; None: its default one.
        splits: the first of these that the configuration has is taken.

    Raises:
        ConfigError: as for a model, or the data set has no such configuration or split.
    """
    with _explained("data set", name, revision, key):
        commit, _ = _snapshot(name, "dataset", revision, ("README.md",))
        folder = _cached(name, commit, config) or _loaded(name, commit, config, key)
    info = json.loads((folder / "dataset_info.json").read_text())
    there = list(info["splits"])
    split = next((split for split in splits if split in there), None)
    if split is None:
        raise ConfigError(
            f"a split {' or '.join(splits)} of {name} ({info['config_name']}) at {key}",
            f"the splits {', '.join(there)}",
            f"Name one: {{path: {name}, split: {there[0]}}}.",
        )
    stem = f"{info['dataset_name']}-{split}"
    whole = folder / f"{stem}.arrow"
    return commit, str(info["config_name"]), split, whole if whole.is_file() else folder / f"{stem}-*.arrow"


def _snapshot(name: str, kind: str, revision: str | None, patterns: Sequence[str]) -> tuple[str, Path]:
    """The commit and the directory of a repository's files in the cache of `huggingface_hub`, which downloads what it lacks."""
    import huggingface_hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    folder = Path(
        huggingface_hub.snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=list(patterns))
    ).absolute()
    return folder.name, folder


def _cached(name: str, commit: str, config: str | None) -> Path | None:
    """What `datasets` has prepared of a commit, or None. Without a configuration's name only `default` is certain."""
    from datasets.config import HF_DATASETS_CACHE
    from datasets.naming import camelcase_to_snakecase

    owner, _, own = name.partition("/")
    root = Path(HF_DATASETS_CACHE).expanduser() / f"{owner}___{camelcase_to_snakecase(own)}"
    for info in sorted(root.glob(f"*/*/{commit}/dataset_info.json")):
        if json.loads(info.read_text())["config_name"] == (config or "default"):
            return info.parent.absolute()
    return None


def _loaded(name: str, commit: str, config: str | None, key: str) -> Path:
    """Has `datasets` download and prepare a commit. Returns the directory of the Arrow files."""
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(name, config, revision=commit)
    except datasets.exceptions.DatasetBuildError as error:
        raise ConfigError(
            f"data that `datasets` can read at {key}, in {name}", f"{error!s:.400}", "Download and convert it."
        ) from error
    except ValueError as error:
        if "onfig" not in str(error):
            raise
        found = " ".join(str(error).partition("Example of usage")[0].split())
        raise ConfigError(f"a configuration of {name} at {key}", f"{found:.400}", "Name one in the key `config`.") from None
    folder = Path(next(iter(loaded.values())).cache_files[0]["filename"]).parent.absolute()
    if folder.name != commit:
        raise ConnectionError(f"only a copy of the commit {folder.name} is in the cache")
    return folder


@contextmanager
def _explained(what: str, name: str, revision: str | None, key: str) -> Iterator[None]:
    """Turns errors of the libraries into ConfigError."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"the packages huggingface_hub and datasets, for the name {name} at {key}",
            f"no {error.name}",
            "Install them, or set a local path.",
        ) from None
    place = hub_address()
    wanted = f"a local path, or a {what} at {place}, called {name}{f'@{revision}' if revision else ''} ({key})"
    try:
        yield
    except PolyremeError:  # some are also a ValueError
        raise
    except GatedRepoError:
        raise ConfigError(wanted, "one that asks for consent", f"Accept its terms at {place}/{name}, and set HF_TOKEN.") from None
    except RepositoryNotFoundError:
        advice = f"Fix {key}, or set HF_TOKEN if it is private."
        raise ConfigError(wanted, "neither a file nor such a repository", advice) from None
    except RevisionNotFoundError:
        raise ConfigError(wanted, "no such revision", f"Name a branch, tag or commit of {name}.") from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        offline = huggingface_hub.constants.HF_HUB_OFFLINE
        found = "offline mode (HF_HUB_OFFLINE), and not in the cache" if offline else f"{type(error).__name__}: {error!s:.300}"
        advice = (
            f"Fix {key}, or download it where there is a network, with the same HF_HOME (now"
            f" {huggingface_hub.constants.HF_HOME})."
        )
        raise ConfigError(wanted, found.replace("\n", " "), advice) from error
