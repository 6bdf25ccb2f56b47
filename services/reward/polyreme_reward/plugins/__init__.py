"""Rewards that are Python functions with the signatures of several systems. Only worker processes load and call them."""
