"""Rewards written as Python functions, in the signatures people already have. Loaded and called in worker processes only."""
