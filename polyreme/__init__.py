"""The core that all services share: configuration, contracts, the experience log, weight transfer, the `polyreme` command.

Invariant: the core imports no torch, vllm, megatron or fastapi, not even transitively, so every image and every process can
import it. `polyreme.Run` is imported when it is first used; `__init__.pyi` has its type.
"""

import os
from importlib import import_module

# gRPC's C core reads these once, when `grpc` is first imported, so they are set before any module of ours can import it. Its fork
# handlers restart its threads in a child between fork and exec, where closed file descriptors abort the child now and then.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC would repeat our errors on stderr

API_VERSION = 1
"""Schema number of proto/polyreme/api/v1. Services with different numbers refuse each other."""


def __getattr__(name: str) -> object:
    if name == "Run":
        return import_module("polyreme.display.notebook").RunHandle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
