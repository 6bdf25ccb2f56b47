"""What is resumed from is what was saved: any byte of a checkpoint or of the reference that differs is noticed, and said."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from polyreme.errors import ConfigError
from polyreme_trainer.learner.leader import Ranks
from polyreme_trainer.megatron.checkpoint import digest_of, iteration_path, newest, write_manifest
from polyreme_trainer.megatron.saves import Saves
from support.configs import run_config

STRIDE = 7
"""Every byte of a manifest is flipped by test_checkpoint; of larger files every seventh."""


@pytest.fixture
def saves(tmp_path: Path) -> Iterator[Saves]:
    """Of a run whose iterations 4 and 6 are saved, beside the export of version 0."""
    config = run_config(tmp_path)
    for iteration in (4, 6):
        folder = iteration_path(config.run_dir / "checkpoints", iteration)
        folder.mkdir(parents=True)
        state = {"actor": {"weights": torch.full((64,), float(iteration)), "steps": iteration}}
        torch.save(state, folder / "state-0.pt")
        torch.save(torch.get_rng_state(), folder / "rng-0.pt")
        files = {name: digest_of(folder / name) for name in ("state-0.pt", "rng-0.pt")}
        write_manifest(folder, iteration, {"tensor": 1}, {"term": iteration}, files)
    export = config.run_dir / "hf" / "iteration-000000"
    export.mkdir(parents=True)
    (export / "model.safetensors").write_bytes(bytes(range(200)))
    ranks = Ranks()
    yield Saves(config, {}, ranks)
    ranks.close()


def flips(file: Path, stride: int) -> Iterator[int]:
    """Positions in a file, while the byte there is another one."""
    whole = file.read_bytes()
    for position in range(0, len(whole), stride):
        file.write_bytes(whole[:position] + bytes([whole[position] ^ 0x40]) + whole[position + 1 :])
        yield position
    file.write_bytes(whole)


@pytest.mark.parametrize("name", ["state-0.pt", "rng-0.pt", "checkpoint.json"])
def test_no_checkpoint_with_a_flipped_byte_is_resumed_from(saves: Saves, name: str) -> None:
    root = saves.hf_path(0).parents[1] / "checkpoints"
    for position in flips(iteration_path(root, 6) / name, STRIDE):
        found = newest(root)
        assert found is not None and (found.iteration, found.facts) == (4, {"term": 4}), f"byte {position} of {name}"
    found = newest(root)
    assert found is not None and found.iteration == 6


def test_a_run_whose_checkpoints_are_all_damaged_says_so(saves: Saves) -> None:
    root = saves.hf_path(0).parents[1] / "checkpoints"
    for iteration in (4, 6):
        file = iteration_path(root, iteration) / "state-0.pt"
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError) as error:
        saves.load([])
    assert str(root) in error.value.expected and error.value.found.startswith("2")


def test_a_reference_with_a_flipped_byte_is_refused(saves: Saves) -> None:
    file = saves.hf_path(0) / "model.safetensors"
    facts = {"reference": digest_of(file)}
    assert saves.check_reference(facts) == saves.hf_path(0)
    for _ in flips(file, STRIDE):
        fresh = Saves(saves._config, {}, Ranks())  # a resume reads the file anew
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            fresh.check_reference(facts)
