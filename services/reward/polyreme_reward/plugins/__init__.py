"""Rewards written as Python functions, in the signatures of several systems. Loaded and called in worker processes only."""
