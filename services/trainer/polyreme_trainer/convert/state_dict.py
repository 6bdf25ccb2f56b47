"""Reads bare state dicts: files of torch.save or safetensors with Hugging Face's names, possibly wrapped.

Invariant: the result has exactly the model's tensors, without wrappers, prefixes and aliases; any other content is a ConfigError.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from polyreme.errors import ConfigError
from polyreme_trainer.convert import pickles
from polyreme_trainer.convert.names import check_shapes
from polyreme_trainer.megatron.huggingface import hf_mapping
from polyreme_trainer.megatron.huggingface.families.base import Architecture

WRAPPERS = ("state", "state_dict", "model_state_dict", "model", "module", "policy")


def read(file: Path, arch: Architecture) -> dict[str, Tensor]:
    """The model's tensors by Hugging Face's names, without wrappers' prefixes, aliases and MTP layers. Raises ConfigError."""
    tensors = _safetensors(file) if file.suffix == ".safetensors" else _unwrapped(pickles.load(file), file)
    named = _without_prefixes(tensors)
    for alias, name in hf_mapping.hf_aliases(arch).items():
        if alias in named and name in named and not named[alias].equal(named[name]):
            raise ConfigError(
                f"{alias} equal to {name} in {file}, because the config.json has tie_word_embeddings: true",
                "different numbers",
                "Set tie_word_embeddings: false in that config.json.",
            )
        named.pop(alias, None)
    for name in [name for name in named if name.startswith(arch.unread)]:
        del named[name]
    check_shapes(hf_mapping.hf_shapes(arch), {name: tuple(tensor.shape) for name, tensor in named.items()}, str(file))
    return named


def _unwrapped(content: object, file: Path) -> dict[str, Tensor]:
    """The innermost mapping of tensors, below any wrappers' keys."""
    while isinstance(content, Mapping):
        if tensors := {name: value for name, value in content.items() if isinstance(value, Tensor)}:
            return tensors
        inner = [content[name] for name in WRAPPERS if isinstance(content.get(name), Mapping)]
        if len(inner) != 1:
            break
        (content,) = inner
    found = f"keys {sorted(map(str, content))[:8]}" if isinstance(content, Mapping) else type(content).__name__
    raise ConfigError(f"tensors, or one of {', '.join(WRAPPERS)} around them, in {file}", found, "Save only the weights.")


def _without_prefixes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Removes wrappers' prefixes that all names have. `model.` stays: it belongs to Hugging Face's own names."""
    prefixes = tuple(f"{name}." for name in WRAPPERS if name != "model")
    names = list(tensors)
    while prefix := next((prefix for prefix in prefixes if all(name.startswith(prefix) for name in names)), None):
        names = [name.removeprefix(prefix) for name in names]
    return dict(zip(names, tensors.values(), strict=True))


def _safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"a safetensors file {file}", str(error), "Restore the file.") from None
