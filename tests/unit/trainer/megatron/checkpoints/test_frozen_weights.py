"""The weights beside which something was trained, at a resume."""

import threading
from pathlib import Path

import pytest

from polyreme.errors import ConfigError
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.checkpoints import saves
from polyreme_trainer.megatron.checkpoints.checkpoint import weights_digest
from polyreme_trainer.megatron.checkpoints.saves import FrozenWeights


def weights(folder: Path, content: bytes = b"weights") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def test_other_weights_than_those_recorded_are_refused_by_their_directory(tmp_path: Path, ranks: Ranks) -> None:
    directories = {"model.path": weights(tmp_path / "model"), "reference": weights(tmp_path / "reference")}
    recorded = FrozenWeights(ranks).record(directories)
    FrozenWeights(ranks).check(directories, recorded)
    weights(tmp_path / "reference", b"other")
    with pytest.raises(ConfigError) as error:
        FrozenWeights(ranks).check(directories, recorded)
    assert str(tmp_path / "reference") in error.value.expected and recorded["reference"] in error.value.expected


def test_a_directory_is_read_once_and_beside_the_heartbeat(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait without a deadline only while the event loop of rank 0 runs."""
    read: list[tuple[Path, bool]] = []

    def digest(directory: Path) -> str:
        read.append((directory, threading.current_thread() is threading.main_thread()))
        return weights_digest(directory)

    monkeypatch.setattr(saves, "weights_digest", digest)
    directories = dict.fromkeys(("model.path", "reference"), weights(tmp_path / "model"))
    recorded = FrozenWeights(ranks).record(directories)
    assert read == [(tmp_path / "model", True)]  # in the thread of a save
    frozen = FrozenWeights(ranks)
    frozen.check(directories, recorded)
    assert frozen.record(directories) == recorded
    assert read[1:] == [(tmp_path / "model", False)]


@pytest.mark.parametrize(("now", "before"), [(["model.path"], []), ([], ["model.path"]), (["model.path"], ["reference"])])
def test_the_uses_of_frozen_weights_are_those_of_the_checkpoint(
    tmp_path: Path, ranks: Ranks, now: list[str], before: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        FrozenWeights(ranks).check({use: tmp_path / "unread" for use in now}, dict.fromkeys(before, "digest"))
    assert (error.value.expected.count(".path"), error.value.found.count(".path")) == (
        before.count("model.path"),
        now.count("model.path"),
    )
