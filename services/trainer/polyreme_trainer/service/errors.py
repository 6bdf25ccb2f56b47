"""The error that a tenant of the training service can act on."""


class TenantError(Exception):
    """A request that cannot be executed. Its message is the answer, with the category `user`. The model is as before the request."""
