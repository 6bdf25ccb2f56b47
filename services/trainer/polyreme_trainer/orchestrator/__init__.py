"""Turns prompts into scored groups in the experience log. It imports no torch, and meets the learner only in Redis."""
