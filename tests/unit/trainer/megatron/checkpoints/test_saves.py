"""A resume uses exactly the saved state: any different byte of a checkpoint or of the reference is detected and reported."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyreme.config.recipes.algorithm import AlgorithmConfig
from polyreme.config.trainer import CriticConfig, LoraConfig, SftPhase
from polyreme.errors import ConfigError
from polyreme.rundir.checkpoint_manifest import checkpoint_path, digest_of, write_manifest
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.checkpoints.checkpoint import newest, weights_digest
from polyreme_trainer.megatron.checkpoints.saves import RunSaves
from support.configs import run_config

STRIDE = 7
"""test_checkpoint flips every byte of a manifest; these tests flip every seventh byte of larger files."""


@pytest.fixture
def saves(tmp_path: Path, ranks: Ranks) -> RunSaves:
    """The saves of a run with checkpoints of iterations 4 and 6 and the export of version 0."""
    config = run_config(tmp_path)
    for iteration in (4, 6):
        folder = checkpoint_path(config.run_dir / "checkpoints", iteration)
        folder.mkdir(parents=True)
        state = {"actor": {"weights": torch.full((64,), float(iteration)), "steps": iteration}}
        torch.save(state, folder / "state-0.pt")
        torch.save(torch.get_rng_state(), folder / "rng-0.pt")
        files = {name: digest_of(folder / name) for name in ("state-0.pt", "rng-0.pt")}
        write_manifest(folder, iteration, {"tensor": 1}, {"term": iteration}, files)
    export = config.run_dir / "hf" / "iteration-000000"
    export.mkdir(parents=True)
    (export / "model.safetensors").write_bytes(bytes(range(200)))
    return RunSaves(config, ranks)


def flips(file: Path, stride: int) -> Iterator[int]:
    """Yields positions in a file whose byte is flipped during the loop's body."""
    whole = file.read_bytes()
    for position in range(0, len(whole), stride):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 0x40]) + whole[position + 1 :])
        yield position
    file.write_bytes(whole)


@pytest.mark.parametrize("name", ["state-0.pt", "rng-0.pt", "checkpoint.json"])
def test_no_checkpoint_with_a_flipped_byte_is_resumed_from(saves: RunSaves, name: str) -> None:
    root = saves.hf_path(0).parents[1] / "checkpoints"
    for position in flips(checkpoint_path(root, 6) / name, STRIDE):
        found = newest(root)
        assert found is not None and (found.iteration, found.facts) == (4, {"term": 4}), f"byte {position} of {name}"
    found = newest(root)
    assert found is not None and found.iteration == 6


def test_a_run_whose_checkpoints_are_all_damaged_says_so(saves: RunSaves) -> None:
    root = saves.hf_path(0).parents[1] / "checkpoints"
    for iteration in (4, 6):
        file = checkpoint_path(root, iteration) / "state-0.pt"
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError) as error:
        saves.load([])
    assert str(root) in error.value.expected and error.value.found.startswith("2")


def test_a_reference_with_a_flipped_byte_is_refused(saves: RunSaves, ranks: Ranks, tmp_path: Path) -> None:
    file = saves.hf_path(0) / "model.safetensors"
    facts = {"reference": weights_digest(file.parent)}
    assert saves.check_reference(facts) == saves.hf_path(0)
    for _ in flips(file, STRIDE):
        fresh = RunSaves(run_config(tmp_path), ranks)  # a resume reads the file again
        with pytest.raises(ConfigError, match="iteration-000000"):
            fresh.check_reference(facts)


def test_exports_without_a_checkpoint_are_removed_and_other_directories_stay(saves: RunSaves) -> None:
    """Version 0's export is the reference."""
    folder = saves.hf_path(0).parent
    for name in ("iteration-000002", "iteration-000004", "iteration-000004-merged", "best", ".iteration-000005.1234abcd.new"):
        (folder / name).mkdir()
    saves._discard()
    assert {path.name for path in folder.iterdir()} == {"iteration-000000", "iteration-000004", "iteration-000004-merged", "best"}


def run_of(folder: Path, ranks: Ranks, **trainer: Any) -> RunSaves:
    """The saves of a PPO run with the weights in `folder`/model."""
    config = run_config(folder, algorithm=AlgorithmConfig.model_validate({"preset": "ppo"}))
    config.model.path.mkdir(exist_ok=True)
    (config.model.path / "model.safetensors").write_bytes(b"weights")
    return RunSaves(config.model_copy(update={"trainer": config.trainer.model_copy(update=trainer)}), ranks)


def write_checkpoint(saves: RunSaves, **facts: Any) -> None:
    folder = checkpoint_path(saves.hf_path(0).parents[1] / "checkpoints", 1)
    folder.mkdir(parents=True)
    write_manifest(folder, 1, {}, facts, {})


@pytest.mark.parametrize("warm_started", [True, False])
def test_adapters_resume_only_with_or_without_a_warm_start_as_they_began(
    tmp_path: Path, ranks: Ranks, warm_started: bool
) -> None:
    """The warm start decides which frozen weights the reference and the critic have."""
    phase = SftPhase(data=Path("unread"), steps=1, batch_size=1, lr=1e-3)
    saves = run_of(tmp_path, ranks, lora=LoraConfig(rank=2), sft=[] if warm_started else [phase])
    write_checkpoint(saves, frozen={"model.path": weights_digest(tmp_path / "model")}, warm_started=warm_started)
    with pytest.raises(ConfigError) as error:
        saves.load([])
    assert error.value.found == ("no trainer.sft" if warm_started else "trainer.sft with the phases of a warm start")


LORA: dict[str, Any] = {"lora": LoraConfig(rank=2)}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, LORA),
        (LORA, {}),
        (LORA, {**LORA, "critic": CriticConfig(path=Path("another"))}),
        ({**LORA, "critic": CriticConfig(path=Path("another"))}, LORA),
    ],
    ids=["adapters added", "adapters removed", "critic's weights added", "critic's weights removed"],
)
def test_a_checkpoint_beside_other_frozen_weights_is_refused(
    tmp_path: Path, ranks: Ranks, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """It is refused before any role is loaded."""
    saved, present = (run_of(tmp_path, ranks, **trainer) for trainer in (before, after))
    write_checkpoint(saved, frozen=dict.fromkeys(saved.frozen_directories, "digest"), warm_started=False)
    with pytest.raises(ConfigError) as error:
        present.load([])
    for text, saves in ((error.value.expected, saved), (error.value.found, present)):
        assert all((key in text) == (key in saves.frozen_directories) for key in ("model.path", "trainer.critic.path"))
