"""Estimates the memory of a learner before it allocates any.

Invariant: pure functions of the configuration, the architecture and the sharding. No module of this package imports torch.
"""
