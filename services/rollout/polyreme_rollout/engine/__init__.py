"""Inference engines behind one protocol, `protocol.InferenceEngine`. Nothing outside this package imports vllm.

Invariant: an engine is found by its name in the entry-point group `polyreme.engines`, so another distribution can add one.
"""
