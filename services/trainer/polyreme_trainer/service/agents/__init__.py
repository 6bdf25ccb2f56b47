"""Session addresses: agents sample from a tenant's model, and the exact tokens of their turns are kept for its client."""
