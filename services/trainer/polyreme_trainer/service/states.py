"""Models as directories: the states from which a restarted learner continues, and the checkpoints that tenants save.

    MODEL/states/SEQ                 weights and moments after request SEQ; the newest one counts
    MODEL/weights/NAME               a checkpoint to continue from: the same
    MODEL/sampler_weights/NAME       a checkpoint to sample from: PEFT's files, or all weights

Invariant: a directory is there whole or not at all. Each has facts.json: the base model's name, the adapters, the request that wrote it, and
when it expires.
"""

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

from polyreme_trainer.megatron.atomic import discard, new_directory
from polyreme_trainer.megatron.huggingface.hf_files import save_tensors
from polyreme_trainer.service.engine import GRADIENT, TenantState
from polyreme_trainer.service.errors import TenantError
from polyreme_trainer.service.folders import FACTS, Facts, Folders
from polyreme_trainer.service.messages import SavedModel

_TENSORS = "state.safetensors"


class States(Folders):
    """The directories as the learner writes them."""

    def save_state(self, model: str, state: TenantState, base_model: str, seq: int) -> None:
        """Saves the state of a model without a gradient, and deletes its earlier states."""
        assert not state.of(GRADIENT), "a gradient is not saved"
        self._write(self._states(model) / str(seq), state, Facts(base_model, state.lora, seq, state.steps))
        for folder in self._saved(model):
            if int(folder.name) < seq:
                discard(folder)

    def newest_state(self, model: str) -> tuple[int, TenantState] | None:
        """The model's newest saved state, and the request that it includes."""
        saved = self._saved(model)
        return (int(saved[-1].name), self.load(saved[-1])) if saved else None

    def save(self, checkpoint: SavedModel, state: TenantState, facts: Facts, overwrite: bool) -> None:
        """Saves a checkpoint to continue from. Raises TenantError when the name is taken."""
        self._check_free(checkpoint, facts, overwrite)
        self._write(self.folder(checkpoint), state.without(GRADIENT), facts)

    def save_for_sampler(self, checkpoint: SavedModel, write: Callable[[Path], None], facts: Facts, overwrite: bool) -> None:
        """Saves a checkpoint to sample from. `write` fills its directory. Raises TenantError when the name is taken."""
        self._check_free(checkpoint, facts, overwrite)
        with new_directory(self.folder(checkpoint)) as folder:
            write(folder)
            (folder / FACTS).write_text(facts.to_json())

    def load(self, folder: Path) -> TenantState:
        """The model in a directory of states or weights."""
        facts = Facts.read(folder)
        assert facts is not None
        return TenantState(facts.lora, facts.steps, load_file(folder / _TENSORS))

    def remove(self, model: str) -> None:
        """Deletes the states of an unloaded model. Its checkpoints stay."""
        discard(self._states(model))

    def sweep(self, model: str) -> None:
        """Deletes the model's expired checkpoints."""
        for folder in (self.root / model).glob("*weights/*"):
            if (facts := Facts.read(folder)) is not None and facts.is_expired:
                discard(folder)

    def _states(self, model: str) -> Path:
        return self.root / model / "states"

    def _saved(self, model: str) -> list[Path]:
        """The model's states, the oldest first."""
        folders = self._states(model).iterdir() if self._states(model).exists() else ()
        return sorted((folder for folder in folders if folder.name.isdigit()), key=lambda folder: int(folder.name))

    def _check_free(self, checkpoint: SavedModel, facts: Facts, overwrite: bool) -> None:
        """A request that is executed again after a restart finds what it has written itself."""
        before = Facts.read(self.folder(checkpoint))
        if before is not None and not overwrite and before.seq != facts.seq:
            raise TenantError(f"expected a new name, or overwrite; found a checkpoint at {checkpoint}")

    def _write(self, path: Path, state: TenantState, facts: Facts) -> None:
        with new_directory(path) as folder:
            save_tensors(state.tensors, folder / _TENSORS)
            (folder / FACTS).write_text(facts.to_json())
