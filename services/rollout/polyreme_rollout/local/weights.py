"""A saved model's weights, in shared memory for an inference engine: the base model's with an adapter merged in, or its own.

Invariant: a merged weight is W + scale B A, computed in float32 and rounded to the engine's dtype, as the trainer merges it.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from polyreme.errors import ConfigError
from polyreme.weights.arena import Arena
from polyreme.weights.digest import seal
from polyreme.weights.manifest import ArenaSource, TensorSpec, plan_manifest, tensor_views

_DTYPES = {"float32": (torch.float32, "F32"), "bfloat16": (torch.bfloat16, "BF16")}
_CONFIG, _TENSORS, _PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."


class SavedWeights:
    """Writes saved models into a private arena, one at a time.

    Args:
        base: the base model's Hugging Face directory.
        names: the tensors that the engine loads.
        dtype: the engine's.
    """

    def __init__(self, base: Path, names: frozenset[str], dtype: str) -> None:
        self._base, self._torch_dtype = base, _DTYPES[dtype][0]
        with tensors_of(base) as tensors:
            if missing := names - tensors.keys():
                raise ConfigError(
                    f"the tensors of the engine in {base}", f"no {min(missing)}", "Serve this model with another engine."
                )
            specs = [TensorSpec(name, _DTYPES[dtype][1], tuple(tensors[name].shape)) for name in tensors if name in names]
        self._plan = plan_manifest(specs, {})
        self._arena = Arena.private(self._plan.nbytes)
        self._version = 0

    def write(self, folder: Path | None) -> ArenaSource:
        """Writes the base model, or the model saved in a folder. An earlier source is no longer valid. Raises OSError, KeyError,
        ValueError."""
        self._version += 1
        pairs, scale = read_adapter(folder) if folder is not None and (folder / _CONFIG).exists() else ({}, 0.0)
        self._arena.begin(0)
        views = tensor_views(self._plan, self._arena.slot_view(0))
        with tensors_of(self._base if folder is None or pairs else folder) as tensors, torch.no_grad():
            for name, view in views.items():
                weight = tensors[name]
                if name in pairs:
                    a, b = pairs[name]
                    weight = weight.float().addmm(b.float(), a.float(), alpha=scale)
                target = torch.from_numpy(view)
                (target if self._torch_dtype == torch.float32 else target.view(self._torch_dtype)).copy_(weight)
        sealed = seal(self._plan.stamped("saved", 0, self._version), self._arena.slot_view(0))
        generation = self._arena.complete(0, self._version, 0)
        return ArenaSource(str(self._arena.path), self._arena.nonce, 0, generation, sealed)

    def close(self) -> None:
        self._arena.close()


class _Files(Mapping[str, Tensor]):
    """Tensors that are read at access."""

    def __init__(self, files: Mapping[str, object]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)  # type: ignore[attr-defined]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextmanager
def tensors_of(folder: Path) -> Iterator[Mapping[str, Tensor]]:
    """The tensors of a directory's safetensors by name. Raises OSError."""
    with ExitStack() as stack:
        try:
            files = [stack.enter_context(safe_open(file, "pt")) for file in sorted(folder.glob("*.safetensors"))]
        except SafetensorError as error:
            raise OSError(f"damaged safetensors: {error}") from None
        yield _Files({name: file for file in files for name in file.keys()})  # noqa: SIM118 - the file is no mapping


def read_adapter(folder: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """The adapter of a directory in PEFT's format: name of a weight -> A [rank, in] and B [out, rank]; and the factor of B A."""
    config = json.loads((folder / _CONFIG).read_text())
    with tensors_of(folder) as tensors:
        names = [name for name in tensors if name.endswith(".lora_A.weight")]
        pairs = {
            name.removeprefix(_PREFIX).removesuffix(".lora_A.weight") + ".weight": (
                tensors[name],
                tensors[name.removesuffix(".lora_A.weight") + ".lora_B.weight"],
            )
            for name in names
        }
    rank = config["r"]
    return pairs, config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
