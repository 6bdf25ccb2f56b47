"""Turns prompts into scored groups in the experience log. It imports no torch, and talks to the learner only through Redis."""
