"""Typed reading of a Hugging Face config.json.

Invariant: for any content of the file, a reader gets a value of the requested type and range, or a ConfigError that names the
file and the field. Except for `load`, the module is pure; it imports neither torch nor transformers.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from polyreme.errors import ConfigError

SLIDING = "sliding_attention"
FULL = "full_attention"
"""The kinds of layers in `layer_types`."""


class HfConfig:
    """The fields of one config.json, or of one object inside it.

    Args:
        fields: the parsed JSON object.
        source: the file's path, with the name of the object inside it, for error messages.
    """

    def __init__(self, fields: Mapping[str, object], source: str = "config.json") -> None:
        self._fields = dict(fields)
        self.source = source

    @classmethod
    def load(cls, directory: Path) -> "HfConfig":
        """Reads `directory`/config.json. Raises ConfigError when it is missing or not a JSON object."""
        file = Path(directory) / "config.json"
        if not file.is_file():
            raise ConfigError(
                "a Hugging Face model directory", f"no file {file}", "Set model.path to a directory with a config.json."
            )
        try:
            fields = json.loads(file.read_bytes())
        except ValueError as error:  # JSON and UTF-8 errors
            raise ConfigError(f"JSON in {file}", str(error), "Restore the file from the model's source.") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"a JSON object in {file}", type(fields).__name__, "Restore the file from the model's source.")
        return cls(fields, str(file))

    def with_defaults(self, defaults: Mapping[str, object]) -> "HfConfig":
        """The same fields, with `defaults` for those that are absent. A null is not absent: it means that the feature is off."""
        return HfConfig({**defaults, **self._fields}, self.source)

    def merged(self, other: "HfConfig") -> "HfConfig":
        """The fields of both; where both have a field, that of `other`."""
        return HfConfig({**self._fields, **other._fields}, f"{other.source} and {self.source}")

    def __len__(self) -> int:
        return len(self._fields)

    def __contains__(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self._fields.get(name) is not None

    def integer(self, name: str, *, zero: bool = False) -> int:
        """A positive integer. `zero`: or 0."""
        value = self._fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < (0 if zero else 1):
            raise self._error(name, "an integer of at least 0" if zero else "a positive integer")
        return value

    def number(self, name: str, *, zero: bool = False) -> float:
        """A positive, finite number. `zero`: or 0."""
        value = self._fields.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
            raise self._error(name, "a positive number")
        if not value and not zero:
            raise self._error(name, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._fields.get(name)
        if not isinstance(value, bool):
            raise self._error(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self._fields.get(name)
        if not isinstance(value, str):
            raise self._error(name, "a string")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings."""
        value = self._fields.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._error(name, "a list of strings")
        return value

    def section(self, name: str) -> "HfConfig":
        """The object under `name`; an empty one when it is absent or null."""
        value = self._fields[name] if name in self else {}
        if not isinstance(value, dict):
            raise self._error(name, "an object")
        return HfConfig(value, f"{name} of {self.source}")

    def only(self, name: str, value: object) -> None:
        """Raises ConfigError unless the field is `value`, absent or null."""
        if name in self and self._fields[name] != value:
            raise self._error(name, json.dumps(value), "Choose a model without this feature.")

    def absent(self, name: str) -> None:
        """Raises ConfigError unless the field is absent or null."""
        if name in self:
            raise self._error(name, "absent", "Choose a model without this feature.")

    def _error(self, name: str, expected: str, do: str = "Restore the file from the model's source.") -> ConfigError:
        found = f"{name} = {json.dumps(self._fields[name])[:200]}" if name in self._fields else "no such field"
        return ConfigError(f"{name}: {expected}, in {self.source}", found, do)
