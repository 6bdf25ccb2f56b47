"""How much memory a learner needs, before it allocates any.

Invariant: pure functions of the configuration, the architecture and the sharding. No module of this package imports torch.
"""
