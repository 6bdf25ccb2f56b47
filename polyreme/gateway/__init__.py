"""One OpenAI-compatible address for all replicas of a run.

Invariant: replies pass through unchanged. The gateway holds no state that a second gateway of the same run would need.
"""
