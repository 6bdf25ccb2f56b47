"""The errors that a tenant of the training service can act on."""

CHECKPOINT_LOST = "expected a saved checkpoint; found one that was deleted while it was read"
"""Message of a ModelLostError."""


class TenantError(Exception):
    """A request that cannot be executed. Its message is the answer, with the category `user`. The model is as before it."""


class ModelLostError(TenantError):
    """The request has spoilt the model in memory, which has to be taken from its saved state and its earlier requests again."""
