"""`polyreme chat`: a conversation with a policy."""
