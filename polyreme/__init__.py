"""What all Polyreme services share: config, contracts, the experience log, weights in transit, and the `polyreme` command.

Imports no torch, vllm, megatron or fastapi, also not transitively, so that every image and every process can afford it.
"""

API_VERSION = 1
"""Schema number of proto/polyreme/api/v1. Services of different numbers refuse each other."""
