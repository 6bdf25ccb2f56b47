"""The core that all Polyreme services share: configuration, contracts, the experience log, weight transfer, the `polyreme` command.

Invariant: the core imports no torch, vllm, megatron or fastapi, not even transitively, so every image and every process can import it.
"""

API_VERSION = 1
"""Schema number of proto/polyreme/api/v1. Services with different numbers refuse each other."""
