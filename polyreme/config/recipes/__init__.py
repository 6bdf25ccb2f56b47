"""Algorithms as recipes: presets, their primitives, and the checks of both."""
