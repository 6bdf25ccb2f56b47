"""Turns prompts into scored groups in the experience log. It imports no torch, and communicates with the learner only through Redis."""
