"""The core that all Polyreme services share: configuration, contracts, the experience log, weight transfer, the `polyreme` command.

Invariant: the core imports no torch, vllm, megatron or fastapi, not even transitively, so every image and every process can import it.
`polyreme.Run` is imported when it is first used; `__init__.pyi` has its type.
"""

from importlib import import_module
from typing import Any

API_VERSION = 1
"""Schema number of proto/polyreme/api/v1. Services with different numbers refuse each other."""


def __getattr__(name: str) -> Any:
    if name == "Run":
        return import_module("polyreme.cli.notebook").RunHandle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
