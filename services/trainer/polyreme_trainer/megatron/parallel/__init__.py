"""Ranks: their groups, channels, shares of a batch, and states in another layout."""
